"""The page of a run that goes on: what it says, and how a browser shows it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from allhands.errors import UserError
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.run_page import RunPage, serve_page
from allhands.wire.page_server import PageServer
from tests.browser import BACKGROUNDS, background, needs_browser, new_view, open_browser

NAMES = ["north", "east", "south"]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    made = EventLog(tmp_path / "events.jsonl")
    yield made
    made.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    made = serve_page(tmp_path / "events.jsonl", 0.0, 0)
    yield made
    made.close()


def begin(events: EventLog) -> None:
    events.say("begin", sites=NAMES, needed=2, per_round=3, rounds=4, round=0, algorithm="fedavg")
    for name in NAMES[:2]:
        events.say("greeted", site=name, samples=40, tests=4)


def round_of(events: EventLog, number: int) -> None:
    events.say("round", round=number, cohort=NAMES[:2], absent=NAMES[2:])
    for name in NAMES[:2]:
        figures: dict[str, Any] = {"steps": 4, "loss": 0.5, "norm": 1.0, "seconds": 2.0}
        events.say(
            "update", site=name, round=number, samples=40, waited=3.0, bytes=2_000_000, **figures
        )
    values = {"clients": {"loss": 0.5 / (number + 1), "accuracy": 0.75}}
    events.say("round_end", round=number, brought=NAMES[:2], seconds=4.0, loss=0.25, values=values)


def text_of(page: RunPage, path: str = "now") -> str:
    found = page.answer(path)
    assert found is not None
    return found.body.decode()


def test_it_tells_rounds_sites_values_and_who_is_silent(events: EventLog, tmp_path: Path) -> None:
    page = RunPage(tmp_path / "events.jsonl", 0.0)
    assert "Waiting for the first round." in text_of(page)
    begin(events)
    round_of(events, 0)
    events.say("failed", site="east", round=1, reason="ValueError: <b>no</b>")
    text = text_of(page)
    assert "Round 2 of 4." in text
    assert "<td>north</td><td>ready</td>" in text
    assert re.search(r"Silent: south \(not connected, \d s\)\.", text)
    assert re.search(r'<td>1</td><td class="n">2</td><td class="n">4\.0</td>', text)
    assert "ValueError: &lt;b&gt;no&lt;/b&gt;" in text
    assert "<b>no" not in text
    events.say("round", round=1, cohort=NAMES[:2], absent=NAMES[2:])
    assert "In training: north (0 s), east (0 s)." in text_of(page)
    events.say("end", rounds=2, reason="finished")
    ended = text_of(page)
    assert "Ended: finished." in ended
    assert "Silent" not in ended


def test_events_of_an_earlier_run_are_not_shown(events: EventLog, tmp_path: Path) -> None:
    begin(events)
    assert "Waiting for the first round." in text_of(
        RunPage(tmp_path / "events.jsonl", time.time() + 60)
    )


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = RunPage(tmp_path / "events.jsonl", 0.0)
    assert page.answer("other") is None
    text = text_of(page, "")
    assert not re.search(r"https?:|src=|@import|url\(", text)
    (nonce,) = re.findall(r'<script nonce="([^"]+)">', text)
    answer = page.answer("")
    assert answer is not None
    assert answer.nonce != nonce  # a new one each time
    assert text.count("<script") == 1


def test_a_port_that_is_taken_is_refused_by_name(server: PageServer, tmp_path: Path) -> None:
    port = urlsplit(server.address).port
    assert port is not None
    with pytest.raises(UserError, match=f"--page {port} cannot be listened on"):
        serve_page(tmp_path / "events.jsonl", 0.0, port)


@needs_browser
def test_a_browser_shows_the_run_as_it_goes_on(
    server: PageServer, events: EventLog, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with open_browser() as browser:
        seen: list[str] = []
        wrong: list[str] = []
        views = []
        for width, scheme in ((1280, "light"), (400, "dark")):
            view = new_view(browser, width, scheme)
            view.on("request", lambda request: seen.append(request.url))
            view.on("console", lambda message: wrong.append(message.text))
            view.goto(server.address)
            views.append(view)
        begin(events)
        round_of(events, 0)
        for view in views:
            view.wait_for_selector("text=Round 2 of 4.")
            assert view.locator("svg").count() == 2
            assert "Silent: south" in view.inner_text("main")
        views[1].evaluate("document.querySelector('.wide').scrollLeft = 60")
        round_of(events, 1)
        backs = []
        for view, width in zip(views, (1280, 400), strict=True):
            view.wait_for_selector("text=Round 3 of 4.")
            assert view.evaluate("document.documentElement.scrollWidth") == width
            assert view.evaluate("document.querySelector('td').offsetHeight") < 40
            backs.append(background(view))
        assert views[1].evaluate("document.querySelector('.wide').scrollLeft") == 60
        assert backs == list(BACKGROUNDS.values())
        assert wrong == []
        assert all(url.startswith(server.address) for url in seen if url != "data:,")
        assert "refused" in views[1].goto(server.address[:-4]).text()
        server.close()
        views[0].wait_for_selector("text=does not answer any more")
        assert "Round 3 of 4." in views[0].inner_text("main")
