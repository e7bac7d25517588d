"""Peers that are turned away before they are asked to train, one by one: by what they train, by
their answer to "hello", by their keys and tokens. They are named in the events with the reason, and
the server goes on with the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from allhands.federated.sites import site_keys
from allhands.federated.sites.site_training import Across
from tests.federated.sites import across as trial
from tests.federated.sites.fake_grid import FakeGrid
from tests.federated.sites.hostile import (
    BRIEF,
    HONEST,
    NODE,
    NOISE,
    ROUNDS,
    WEST,
    a_world_and_no_waiting,  # noqa: F401
    finished,
    of,
    reference,
    run,
)


def crowd(folder: Path, handlers: list[Callable[[RecordDict], RecordDict]]) -> FakeGrid:
    """Three honest sites, and beside them these."""
    made = trial.grid(folder, rounds=ROUNDS, **BRIEF)
    del made.nodes[NODE]
    for place, handler in enumerate(handlers):
        made.add(200 + place, handler)
    return made


def turned_away(grid: FakeGrid, tmp_path: Path, **across: Any) -> list[dict[str, Any]]:
    """The events of a run in which only the honest ones take part."""
    model, history, events = run(Across(grid, **across), tmp_path)
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, False))
    for number, node in grid.nodes.items():
        assert number < 200 or all(asked["allhands"]["kind"] == "hello" for asked in node.asked)
    return events


def test_the_reference_is_what_three_sites_give(tmp_path):
    turned_away(crowd(tmp_path, []), tmp_path)


def test_sites_that_train_something_else(tmp_path):
    version = trial.site(3, tmp_path / "version", rounds=ROUNDS, **BRIEF)
    version.description["allhands"] = "0.0.1"
    labels = trial.site(3, tmp_path / "labels", rounds=ROUNDS, **BRIEF)
    labels.description["labels"] = ["healthy", "ill", "who knows"]
    cases = {
        "allhands is 0.0.1 here and": version.handle,
        "1.weight": trial.site(3, tmp_path / "model", norm=True, rounds=ROUNDS, **BRIEF).handle,
        "local_epochs is 5 here and 1 at the server": trial.site(
            3, tmp_path / "epochs", rounds=ROUNDS, local_epochs=5
        ).handle,
        "the classes are healthy, ill, who knows here and healthy, ill, dead at the "
        "server": labels.handle,
    }
    grid = crowd(tmp_path, list(cases.values()))
    model, history, events = run(grid, tmp_path, labels=["healthy", "ill", "dead"])
    found = [event["reason"] for event in of(events, "refused")]
    assert len(found) == len(cases)
    for words_ in cases:
        assert any(words_ in reason for reason in found), words_
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, False))


def answer(
    config: dict[str, Any] | None = None, **counts: Any
) -> Callable[[RecordDict], RecordDict]:
    """A peer that says this to everything."""

    def handle(request: RecordDict) -> RecordDict:
        del request
        reply = RecordDict()
        if config is not None:
            reply["allhands"] = ConfigRecord(config)
        if counts:
            reply["figures"] = MetricRecord(counts)
        return reply

    return handle


OK = {"status": "ok", "site": WEST}
DOOR = {
    "no samples": (answer(OK, samples=0.0, tests=0.0), "no sample to train on"),
    "half a sample": (answer(OK, samples=2.5, tests=0.0), "how many samples"),
    "NaN samples": (answer(OK, samples=math.nan, tests=0.0), "how many samples"),
    "a list of samples": (answer(OK, samples=[3.0, 3.0], tests=0.0), "how many samples"),
    "more samples than there can be": (answer(OK, samples=1e300, tests=0.0), "how many samples"),
    "fewer tests than none": (answer(OK, samples=3.0, tests=-1.0), "how many samples"),
    "no word of samples": (answer(OK), "how many samples"),
    "no status": (answer({"site": WEST}, samples=3.0), "does not say why"),
    "a name of nobody": (
        answer({"status": "ok", "site": "mallory"}, samples=3.0),
        "it is called 'mallory'",
    ),
    "another site's name": (
        answer({"status": "ok", "site": "north"}, samples=3.0),
        "another node is connected as 'north'",
    ),
    "a name that is none": (
        answer({"status": "ok", "site": [1, 2]}, samples=3.0),
        "it is called '[1, 2]'",
    ),
    "bytes for a name": (
        answer({"status": "ok", "site": b"\x00west"}, samples=3.0),
        "give it one of these names",
    ),
}


def test_answers_to_hello_that_cannot_be(tmp_path):
    events = turned_away(crowd(tmp_path, [handler for handler, _ in DOOR.values()]), tmp_path)
    found = of(events, "refused")
    assert len(found) == len(DOOR)
    for case, (_, reason) in DOOR.items():
        assert any(reason in event["reason"] for event in found), case


def test_an_answer_to_hello_without_anything_is_a_failure(tmp_path):
    assert of(turned_away(crowd(tmp_path, [answer()]), tmp_path), "failed")


# ---------------------------------------------------------------------- keys and tokens


@pytest.fixture
def pairs(tmp_path) -> dict[str, bytes]:
    """Public keys of the four sites and of a stranger."""
    made = {}
    for name in (*trial.NAMES, "stranger"):
        site_keys.make_site_key(tmp_path / f"{name}.key", name)
        made[name] = site_keys.read_site_key(tmp_path / f"{name}.key")
    return made


def test_nodes_whose_keys_are_not_on_the_list(tmp_path, pairs):
    honest = trial.site(3, tmp_path / "west", rounds=ROUNDS, **BRIEF).handle
    strangers = {
        pairs["stranger"]: site_keys.fingerprint(pairs["stranger"]),
        b"": "no key",
        b"north": "no key",
        NOISE: "no key",
    }
    grid = crowd(tmp_path, [honest] * len(strangers))
    for place, key in enumerate(strangers):
        grid.nodes[200 + place].key = key
    for client, name in enumerate(HONEST):
        grid.nodes[100 + client].key = pairs[name]
    events = turned_away(grid, tmp_path, allowed={name: pairs[name] for name in trial.NAMES})
    found = of(events, "stranger")
    assert [event["node"] for event in found] == [
        str(200 + place) for place in range(len(strangers))
    ]
    assert all(
        words_ in event["reason"] for event, words_ in zip(found, strangers.values(), strict=True)
    )
    assert all(grid.nodes[200 + place].asked == [] for place in range(len(strangers)))


def test_a_site_that_calls_itself_by_the_name_of_another(tmp_path, pairs):
    grid = crowd(tmp_path, [trial.site(0, tmp_path / "other", rounds=ROUNDS, **BRIEF).handle])
    for node, name in zip(grid.nodes.values(), trial.NAMES, strict=True):
        node.key = pairs[name]
    events = turned_away(grid, tmp_path, allowed={name: pairs[name] for name in trial.NAMES})
    (event,) = of(events, "refused")
    assert event["site"] == WEST
    assert "its key is that of 'west', and it calls itself 'north'" in event["reason"]


def with_token(
    handler: Callable[[RecordDict], RecordDict], token: Any
) -> Callable[[RecordDict], RecordDict]:
    def handle(request: RecordDict) -> RecordDict:
        reply = handler(request)
        if request["allhands"]["kind"] == "hello" and token is not None:
            known = dict(reply["allhands"])
            proof = (
                site_keys.prove(token, request["allhands"]["challenge"], known["site"])
                if isinstance(token, str)
                else token
            )
            reply["allhands"] = ConfigRecord({**known, "proof": proof})
        return reply

    return handle


def write_tokens(file: Path, *names: str) -> None:
    file.write_text("".join(f"{name} {name}-secret-0123456789\n" for name in names))
    file.chmod(0o600)


def test_tokens_that_are_wrong_or_missing(tmp_path):
    write_tokens(tmp_path / "tokens", *trial.NAMES)
    west = trial.site(3, tmp_path / "west", rounds=ROUNDS, **BRIEF).handle
    cases = {
        None: "it has no token",
        "": "is not the one",
        "west-secret-0123456788": "is not the one",
        "north-secret-0123456789": "is not the one",
        b"west-secret-0123456789": "it has no token",
    }
    grid = crowd(tmp_path, [with_token(west, token) for token in cases])
    for client, name in enumerate(HONEST):
        grid.nodes[100 + client].handler = with_token(
            grid.nodes[100 + client].handler, f"{name}-secret-0123456789"
        )
    events = turned_away(grid, tmp_path, tokens=tmp_path / "tokens")
    found = of(events, "refused")
    assert {event["site"] for event in found} == {WEST}
    assert len({event["reason"] for event in found}) == len(set(cases.values()))
    for reason in cases.values():
        assert any(reason in event["reason"] for event in found)
    assert "secret" not in (tmp_path / "events.jsonl").read_text()


def test_a_token_that_is_taken_away_ends_a_site_in_mid_run_and_one_that_is_given_lets_it_in(
    tmp_path, monkeypatch
):
    from allhands.federated.sites import roll

    monkeypatch.setattr(roll, "_AGAIN", 0.0)
    file = tmp_path / "tokens"
    write_tokens(file, *trial.NAMES)
    grid = trial.grid(tmp_path, rounds=5, **BRIEF)
    for node, name in zip(grid.nodes.values(), trial.NAMES, strict=True):
        node.handler = with_token(node.handler, f"{name}-secret-0123456789")
    trained, first = grid.nodes[100].handler, []

    def handler(request: RecordDict) -> RecordDict:
        if request["allhands"]["kind"] == "train":  # north is the first to be asked in a round
            first.append(request["allhands"]["round"])
            write_tokens(file, *(trial.NAMES if len(first) not in (2, 3) else HONEST))
        return trained(request)

    grid.nodes[100].handler = handler
    _, _, events = run(Across(grid, tokens=file), tmp_path, rounds=5)
    assert first == [0, 1, 2, 3, 4]
    assert [WEST in event["brought"] for event in of(events, "round_end")] == [
        True,
        True,
        False,
        False,
        True,
    ]
    (left,) = of(events, "left")
    assert left["site"] == WEST
    assert "there is no token of 'west'" in left["reason"]
    assert "secret" not in (tmp_path / "events.jsonl").read_text()
