"""Who is there: keys, names, tokens, nodes that say nothing, and greetings that are sent once."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from allhands.errors import UserError
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.post import Post
from allhands.federated.sites.roll import Roll
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.site_keys import prove
from tests.federated.sites.fake_grid import FakeGrid

pytestmark = pytest.mark.usefixtures("quick")
NAMES = ["north", "south"]


def answering(name, samples=5.0, token=None, **config):
    def handle(request):
        asked = request["allhands"]
        assert asked["kind"] == "hello"
        assert json.loads(asked["description"]) == {"model": "it"}
        proof = {} if token is None else {"proof": prove(token, asked["challenge"], name)}
        return RecordDict(
            {
                "allhands": ConfigRecord({"status": "ok", "site": name, **proof, **config}),
                "figures": MetricRecord({"samples": samples, "tests": 2.0}),
            }
        )

    return handle


@pytest.fixture
def make(tmp_path):
    made = []

    def here(**options):
        made.append(Here(tmp_path, **options))
        return made[-1]

    yield here
    for each in made:
        each.events.close()


class Here:
    def __init__(self, folder, allowed=None, tokens=None, **settings):
        self.grid, self.path = FakeGrid(), folder / "events.jsonl"
        self.events = events = EventLog(self.path)
        settings = Sites(**{"wait": 0.05, **settings})
        self.roll = Roll(
            self.grid,
            NAMES,
            allowed,
            tokens,
            settings,
            events,
            Post(self.grid, events),
            '{"model": "it"}',
        )

    def said(self, kind):
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


def tokens(folder, **lines):
    path = folder / "tokens"
    path.write_text("".join(f"{name} {token}\n" for name, token in lines.items()))
    os.chmod(path, 0o600)
    return path


def test_sites_are_listed_in_the_order_of_the_clients(make):
    here = make()
    here.grid.add(8, answering("south"))
    here.grid.add(9, answering("north", samples=7.0))
    here.roll.wait_for()
    assert list(here.roll.connected().items()) == [("north", 9), ("south", 8)]
    assert (here.roll.present["north"].samples, here.roll.present["north"].tests) == (7, 2)
    here.roll.wait_for()
    assert [len(node.asked) for node in here.grid.nodes.values()] == [1, 1]


def test_a_node_is_the_site_of_its_key(make):
    here = make(allowed={"north": b"N", "south": b"S", "west": b"W"})
    for number, (key, name) in enumerate(
        [(b"N", "north"), (b"S", "north"), (b"W", "west"), (b"?", "south")]
    ):
        here.grid.add(number, answering(name), key=key)
    here.roll.wait_for(1)
    assert here.roll.connected() == {"north": 0}
    assert (
        "its key is that of 'south', and it calls itself 'north'"
        in here.said("refused")[0]["reason"]
    )
    strangers = [event["reason"] for event in here.said("stranger")]
    assert strangers[0] == "'west' is none of sites.names"
    assert "is not on the list of sites" in strangers[1]
    assert not here.grid.nodes[3].asked
    here.roll.wait_for(1)
    assert len(here.said("stranger")) == 2  # said once


def test_without_keys_a_name_is_given_once(make):
    here = make()
    here.grid.add(1, answering("north"))
    here.roll.wait_for(1)
    here.grid.add(2, answering("north"))
    here.grid.add(3, answering("nord\x1b[2J"))
    here.roll.wait_for(1)
    assert here.roll.connected() == {"north": 1}
    reasons = [event["reason"] for event in here.said("refused")]
    assert reasons[0] == "another node is connected as 'north'"
    assert reasons[1].startswith("it is called 'nord [2J', and the run's sites are north, south")


def test_a_site_that_was_killed_comes_back_when_its_old_node_is_missed(make):
    here = make()
    here.grid.add(1, answering("north"))
    here.roll.wait_for(1)
    # Without a key Flower takes it for another one.
    here.grid.add(2, answering("north", samples=6.0))
    here.roll.wait_for(1)
    assert here.roll.connected() == {"north": 1}
    del here.grid.nodes[1]
    here.roll.wait_for(1)
    assert here.roll.connected() == {"north": 2}
    assert here.roll.present["north"].samples == 6
    assert len(here.grid.nodes[2].asked) == 1


@pytest.mark.parametrize("samples", [float("nan"), -1.0, 2.5, 1e300])
def test_a_site_that_does_not_say_how_many_samples_it_has_is_refused(make, samples):
    here = make()
    here.grid.add(1, answering("north", samples=samples))
    here.roll.wait_for(0)
    assert here.said("refused")[0]["reason"] == "it does not say how many samples it has"


def test_a_site_that_differs_is_refused_until_it_is_started_anew(make, capsys):
    here = make()
    node = here.grid.add(
        1,
        answering(
            "north", status="refused", reason="the model's 'w' is [2] at the server and [3] here"
        ),
    )
    for _ in range(3):
        here.roll.wait_for(0)
    assert len(node.asked) == 1
    assert (
        "site north is refused: the model's 'w' is [2] at the server and [3] here"
        in capsys.readouterr().out
    )
    node.handler, node.since = answering("north"), "2"
    here.roll.wait_for(1)
    assert here.roll.connected() == {"north": 1}


def test_a_token_counts_as_long_as_its_line_is_in_the_file(make, tmp_path):
    good, other = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
    here = make(tokens=tokens(tmp_path, south=good))
    node = here.grid.add(1, answering("north", token=good))
    here.roll.wait_for(0)
    assert not here.roll.present
    assert all(good not in event["reason"] for event in here.said("refused"))
    tokens(tmp_path, south=other, north=good)
    here.roll.wait_for(1)
    assert list(here.roll.present) == ["north"]
    tokens(tmp_path, south=other)
    here.roll.greet()
    assert not here.roll.present
    assert "token" in here.said("left")[0]["reason"]
    here.roll.wait_for(0)
    assert len(node.asked) == 1  # nothing of it takes a message
    assert good not in here.path.read_text()
    assert good not in repr(here.roll._aside)


def test_a_node_that_says_nothing_is_waited_for_once(make, monkeypatch):
    from allhands.federated.sites import roll

    monkeypatch.setattr(roll, "_GREETING", 0.3)
    here = make()
    here.grid.add(1, answering("north"))
    here.grid.add(2, answering("south")).loses.add("query")
    looks = []
    here.grid.before_pull = lambda: looks.append(True)
    here.roll.wait_for(1)
    assert len(looks) > 1
    looks.clear()
    here.roll.wait_for(1)
    assert len(looks) == 1
    assert list(here.roll.present) == ["north"]


def test_an_answer_without_words_is_asked_for_again(make, monkeypatch):
    here = make(wait=5.0)
    node = here.grid.add(1, lambda request: RecordDict())
    here.roll.wait_for(0)
    assert here.said("failed")[0]["reason"] == "an answer without words"
    node.handler = answering("north")
    here.roll.wait_for(1)
    assert list(here.roll.present) == ["north"]


def test_missing_sites_are_named_with_what_to_do(make, capsys):
    here = make(min=1)
    with pytest.raises(
        UserError,
        match="0 of the 1 sites .* after 0.05 s; missing: north, south. Start them, or set "
        "sites.min",
    ):
        here.roll.wait_for()
    assert "0 of 1 are there; missing: north, south" in capsys.readouterr().out
