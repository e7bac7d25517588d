"""Peers that are wrong, broken or ill-meaning, one by one: named in the events with the reason, never in the average, and the
server goes on.

The site west is the one that is asked to train and answers something else in every round; others are refused at the door. The
reference is a simulation in one process: with a west whose model comes out with NaN, and so is left out of every round, or
without west.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import allhands
from allhands.federated.sites import keys, training
from allhands.federated.sites.arrays import pack, unpack
from allhands.federated.sites.events import Events
from allhands.federated.sites.training import Across
from tests.federated.sites import across as trial
from tests.federated.sites.fake_grid import FakeGrid

WEST, NODE, ROUNDS = "west", 103, 2
HONEST = ["north", "east", "south"]
LENGTH = sum(-(-numbers // 32) * 32 for numbers in (54, 9, 27, 3))  # of a row of the model
NOISE = bytes(range(256))
BRIEF = {"local_epochs": 1}


@pytest.fixture(autouse=True)
def _alone(monkeypatch) -> Iterator[None]:
    from allhands.federated.sites import post, roll

    monkeypatch.setattr(post, "_INTERVAL", 0.005)
    monkeypatch.setattr(roll, "_INTERVAL", 0.005)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are so small that threads only wait for one another
    allhands.init(device="cpu")
    yield
    allhands.finalize()
    torch.set_num_threads(threads)


def run(grid: FakeGrid | Across, folder: Path, rounds: int = ROUNDS, options: dict[str, Any] | None = None, **sites: Any,
        ) -> tuple[torch.nn.Module, dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """The model, the history and the events of a run for which three sites are enough."""
    path = folder / "events.jsonl"
    with pytest.MonkeyPatch.context() as patch:  # events alone: a logdir would have checkpoints written
        patch.setattr(training, "Events", lambda _: Events(path))
        model, history = trial.serve(grid, sites={"min": 3, **sites}, rounds=rounds, **BRIEF, **(options or {}))
    return model, history, [json.loads(line) for line in path.read_text().splitlines()]


def of(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] in kinds]


@functools.cache
def reference(rounds: int, asked: bool) -> torch.nn.Module:
    """The simulation in which west has brought nothing: `asked` and left out, or never there."""
    (x, y), sizes = copy.deepcopy(trial.data()), trial.SIZES
    x[sum(sizes[:3]) :] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "data", lambda: (x, y) if asked else (x[: sum(sizes[:3])], y[: sum(sizes[:3])]))
        patch.setattr(trial, "SIZES", sizes if asked else sizes[:3])
        return trial.simulate(rounds=rounds, **BRIEF, **({"on_bad_update": "skip"} if asked else {}))[0]


def finished(events: list[dict[str, Any]], history: dict[str, Any], rounds: int = ROUNDS) -> None:
    """All rounds, with what the honest ones have brought and nothing of west's."""
    assert history["round"] == list(range(rounds))
    assert not any(history["unchanged"])
    assert [event["brought"] for event in of(events, "round_end")] == [HONEST] * rounds
    assert {event["site"] for event in of(events, "update")} == set(HONEST)
    assert events[-1]["kind"] == "end"
    assert events[-1]["reason"] == "finished"


# ---------------------------------------------------------------------- what it answers when it is asked to train


def update(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[RecordDict], None]:
    """Change the row that west sends."""

    def spoil(reply: RecordDict) -> None:
        row = unpack(reply["update"], {"update": (torch.float32, (LENGTH,))})["update"]
        reply["update"] = pack({"update": change(row)})

    return spoil


def at(place: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(row: torch.Tensor) -> torch.Tensor:
        row[place] = value
        return row

    return change


def figures(**changed: Any) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        kept = {**dict(reply["figures"]), **changed}
        reply["figures"] = MetricRecord({name: value for name, value in kept.items() if value is not None})

    return spoil


def words(**changed: Any) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        reply["allhands"] = ConfigRecord({**dict(reply["allhands"]), **changed})

    return spoil


def raw(data: bytes, stype: str = "numpy.ndarray", shape: tuple[int, ...] = (LENGTH,)) -> Callable[[RecordDict], None]:
    """Send bytes as they are in place of the row."""

    def spoil(reply: RecordDict) -> None:
        reply["update"] = ArrayRecord({"update": Array("float32", shape, stype, data)})

    return spoil


def without(name: str) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        del reply[name]

    return spoil


def scattered(places: Any, values: int) -> Callable[[RecordDict], None]:
    """Send numbers and their places in place of the row."""

    def spoil(reply: RecordDict) -> None:
        given = {"update.places": np.asarray(places, np.int32), "update.values": np.ones(values, np.float32)}
        reply["update"] = ArrayRecord({name: Array(array) for name, array in given.items()})

    return spoil


class Trap:
    """Leaves a mark where somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; os.environ['ALLHANDS_TRAP'] = 'sprung'",)


def numpy_bytes(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def bomb() -> bytes:
    """A header that speaks of more memory than there is, and a few bytes after it."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (2**60,)})
    return stream.getvalue() + NOISE


BAD = {
    "NaN": (update(at(3, math.nan)), "NaN in '0.weight'"),
    "Inf": (update(at(3, -math.inf)), "Inf in '0.weight'"),
    "a number between the weights": (update(at(60, 1.0)), "the gaps between weights"),
    "an enormous update": (update(lambda row: row * 1e8), "norm"),
    "the largest update that there is": (update(lambda row: torch.full_like(row, 3e38) * row.ne(0)), "norm"),
    "a shorter row": (update(lambda row: torch.ones(LENGTH - 1)), f"'update' is [{LENGTH - 1}], and must be [{LENGTH}]"),
    "a row too many": (update(lambda row: torch.ones(1, LENGTH)), f"[1, {LENGTH}]"),
    "another dtype": (update(lambda row: torch.ones(LENGTH, dtype=torch.float64)), "'update' is float64, and must be"),
    "integers for weights": (update(lambda row: torch.ones(LENGTH, dtype=torch.int64)), "'update' is int64, and must be"),
    "an array that nobody asked for": (
        lambda reply: reply.__setitem__("update", pack({"update": torch.ones(LENGTH), "gift": torch.ones(1)})),
        "it has an array 'gift' that was not asked for",
    ),
    "another name": (lambda reply: reply.__setitem__("update", pack({"weights": torch.ones(LENGTH)})), "no array 'update'"),
    "random bytes": (raw((NOISE * LENGTH)[: 4 * LENGTH]), "cannot be read"),
    "no bytes": (raw(b""), "cannot be read"),
    "a cut array": (raw(numpy_bytes(np.zeros(LENGTH, np.float32))[:-9]), "cut off"),
    "a header that promises more than there is": (raw(bomb()), f"'update' is [{2**60}], and must be"),
    "places beyond the row": (scattered([1, LENGTH], 2), "places of 'update' do not rise"),
    "places before the row": (scattered([-1, 3], 2), "places of 'update' do not rise"),
    "a place twice": (scattered([3, 3], 2), "places of 'update' do not rise"),
    "more numbers than places": (scattered([3], 2), "'update.values' is [2], and must be [1]"),
    "a pickle in NumPy's clothes": (raw(numpy_bytes(np.array([Trap()], object), allow_pickle=True)), "'update' is object"),
    "a pickle": (raw(pickle.dumps(Trap()), "pickle"), "not one of NumPy's"),
    "no update": (without("update"), "no update"),
    "an update of another kind": (
        lambda reply: reply.__setitem__("update", ConfigRecord({"update": "yes"})),
        "no update",
    ),
    "more samples than it has": (figures(samples=3000.0), "trained on 3000 samples and said before that it has 3"),
    "no samples": (figures(samples=0.0), "at least one"),
    "fewer than no samples": (figures(samples=-3.0), "at least one"),
    "samples that are no number": (figures(samples=math.nan), "samples=nan"),
    "other steps": (figures(steps=200.0), "took 200 steps, and 1 follow"),
    "a loss that is none": (figures(loss=math.nan), "loss=nan"),
    "no loss": (figures(loss=None), "no figure 'loss'"),
    "no figures": (without("figures"), "no figure 'samples'"),
}
FAILED = {
    "a reply of another round": (words(round=7), "another round or run"),
    "a reply of another run": (words(run="another"), "another round or run"),
    "an update without a word": (without("allhands"), ""),
    "nothing but a refusal": (words(status="refused", reason="no time today"), "no time today"),
    "a refusal without a reason": (words(status="refused", reason=7), ""),
    "a reply without anything": (lambda reply: [reply.__delitem__(name) for name in list(reply)], ""),
}


def in_turn(folder: Path, cases: list[Callable[[RecordDict], Any]]) -> FakeGrid:
    """All four sites; in every round, another case changes what west answers."""
    made, left = trial.grid(folder, rounds=len(cases), **BRIEF), iter(cases)

    def change(asked: str, reply: RecordDict) -> RecordDict:
        if asked == "train":
            assert reply["allhands"]["status"] == "ok"
            next(left)(reply)
        return reply

    made.nodes[NODE].spoil = change
    return made


def test_no_update_enters_the_average_that_must_not(tmp_path, capsys):
    rounds = len(BAD)
    model, history, events = run(in_turn(tmp_path, [spoil for spoil, _ in BAD.values()]), tmp_path, rounds)
    found = {event["round"]: event for event in of(events, "bad", "failed")}
    for round_, (case, (_, reason)) in enumerate(BAD.items()):
        event = found.pop(round_, None)
        assert event is not None, case
        assert (event["kind"], event["site"]) == ("bad", WEST), case
        assert reason in event["reason"], case
    assert not found
    assert history["skipped"] == [[3]] * rounds
    assert f"site {WEST} is left out" in capsys.readouterr().out
    finished(events, history, rounds)
    assert trial.same(model, reference(rounds, True))
    assert "ALLHANDS_TRAP" not in os.environ


def test_replies_that_are_no_answers(tmp_path):
    rounds = len(FAILED)
    model, history, events = run(in_turn(tmp_path, [spoil for spoil, _ in FAILED.values()]), tmp_path, rounds)
    found = {event["round"]: event for event in of(events, "bad", "failed")}
    for round_, (case, (_, reason)) in enumerate(FAILED.items()):
        event = found.pop(round_, None)
        assert event is not None, case
        assert event["site"] == WEST, case
        assert event["reason"], case
        assert reason in event["reason"], case
    assert not found
    finished(events, history, rounds)
    assert trial.same(model, reference(rounds, True))


def test_a_set_bound_of_the_norm_is_kept(tmp_path):
    longer = update(lambda row: row * (20 / torch.linalg.vector_norm(row)))
    model, history, events = run(in_turn(tmp_path, [longer] * ROUNDS), tmp_path, max_norm=19.0)
    assert ["sites.max_norm is 19" in event["reason"] for event in of(events, "bad")] == [True] * ROUNDS
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, True))


def test_an_update_that_was_not_clipped_would_break_the_guarantee(tmp_path):
    clip = {"clip": 0.05, "noise_multiplier": 0.0, "sampling": "fixed"}
    options = {"algorithm": {"name": "fedavg", "weighted": False}, "privacy": clip}
    grid, longer = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF, **options), update(lambda row: row * 2)
    grid.nodes[NODE].spoil = lambda kind, reply: longer(reply) or reply if kind == "train" else reply
    _, history, events = run(grid, tmp_path, options=options)
    bad = of(events, "bad")
    assert [(event["site"], event["round"]) for event in bad] == [(WEST, round_) for round_ in range(ROUNDS)]
    assert all("the norm 0.1, and privacy's clip is 0.05: it has not clipped it" in event["reason"] for event in bad), bad
    assert all(event["norm"] <= 0.05 * 1.00001 for event in of(events, "update"))
    finished(events, history)


def test_a_bad_update_ends_the_run_where_it_shall(tmp_path):
    from allhands.federated.rounds import BadUpdateError

    with pytest.raises(BadUpdateError, match=r"round 0: site west: its update has NaN in '0.weight'.*sites.on_bad='skip'"):
        run(in_turn(tmp_path, [BAD["NaN"][0]]), tmp_path, on_bad="stop")


def test_an_error_is_named_by_its_last_line(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    grid.nodes[NODE].fails = {"train": "Traceback (most recent call last):\n  File …\nValueError: \x1b[2Jno scanner today\n"}
    model, history, events = run(grid, tmp_path)
    assert [event["reason"] for event in of(events, "failed")] == ["ValueError:  [2Jno scanner today"] * ROUNDS
    assert history["failed"] == [[3]] * ROUNDS
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, True))


def test_nothing_at_all(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    grid.nodes[NODE].loses = {"train"}
    model, history, events = run(grid, tmp_path, round_timeout=2.0)
    assert [(event["site"], event["round"]) for event in of(events, "late")] == [(WEST, 0), (WEST, 1)]
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, True))


def test_no_message_can_be_guessed_from_that_of_another_site(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    run(grid, tmp_path)
    asked = [dict(request["allhands"]) for node in grid.nodes.values() for request in node.asked]
    secret = [config.get("nonce", config.get("challenge")) for config in asked]
    assert len(set(secret)) == len(asked) == len(grid.nodes) * (1 + ROUNDS)
    assert all(len(each) >= 32 for each in secret)


def test_the_same_reply_again_counts_once(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    for node in grid.nodes.values():
        node.twice = True
    model, _, events = run(grid, tmp_path)
    assert trial.same(model, trial.simulate(rounds=ROUNDS, **BRIEF)[0])
    assert of(events, "dropped")


def test_what_a_site_measured_is_checked_before_it_is_averaged(tmp_path):
    options = {"test_fraction": 0.2}
    cases = [
        (figures(loss=math.nan), "loss=nan"),
        (figures(right=1e6), "counted 1e+06 right"),
        (figures(count=1e6, classed=1e6), "measured 1e+06 test samples and said before that it has 5"),
        (without("figures"), "count=None"),
    ]
    made, left = trial.grid(tmp_path, rounds=len(cases), **BRIEF, **options), iter(cases)
    made.nodes[101].spoil = lambda kind, reply: next(left)[0](reply) or reply if kind == "evaluate" else reply
    _, history, events = run(made, tmp_path, len(cases), options)
    failed = of(events, "failed")
    assert [event["site"] for event in failed] == ["east"] * len(cases)
    assert all(reason in event["reason"] for event, (_, reason) in zip(failed, cases, strict=True)), failed
    assert len(history["clients"]["loss"]) == len(cases)
    assert all(math.isfinite(loss) for loss in history["clients"]["loss"])


# ---------------------------------------------------------------------- refused at the door


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
        "local_epochs is 5 here and 1 at the server": trial.site(3, tmp_path / "epochs", rounds=ROUNDS, local_epochs=5).handle,
        "the classes are healthy, ill, who knows here and healthy, ill, dead at the server": labels.handle,
    }
    grid = crowd(tmp_path, list(cases.values()))
    model, history, events = run(grid, tmp_path, labels=["healthy", "ill", "dead"])
    found = [event["reason"] for event in of(events, "refused")]
    assert len(found) == len(cases)
    for words_ in cases:
        assert any(words_ in reason for reason in found), words_
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, False))


def answer(config: dict[str, Any] | None = None, **counts: Any) -> Callable[[RecordDict], RecordDict]:
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
    "a name of nobody": (answer({"status": "ok", "site": "mallory"}, samples=3.0), "it is called 'mallory'"),
    "another site's name": (answer({"status": "ok", "site": "north"}, samples=3.0), "another node is connected as 'north'"),
    "a name that is none": (answer({"status": "ok", "site": [1, 2]}, samples=3.0), "it is called '[1, 2]'"),
    "bytes for a name": (answer({"status": "ok", "site": b"\x00west"}, samples=3.0), "give it one of these names"),
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
        keys.make_site_key(tmp_path / f"{name}.key", name)
        made[name] = keys.read_site_key(tmp_path / f"{name}.key")
    return made


def test_nodes_whose_keys_are_not_on_the_list(tmp_path, pairs):
    honest = trial.site(3, tmp_path / "west", rounds=ROUNDS, **BRIEF).handle
    strangers = {pairs["stranger"]: keys.fingerprint(pairs["stranger"]), b"": "no key", b"north": "no key", NOISE: "no key"}
    grid = crowd(tmp_path, [honest] * len(strangers))
    for place, key in enumerate(strangers):
        grid.nodes[200 + place].key = key
    for client, name in enumerate(HONEST):
        grid.nodes[100 + client].key = pairs[name]
    events = turned_away(grid, tmp_path, allowed={name: pairs[name] for name in trial.NAMES})
    found = of(events, "stranger")
    assert [event["node"] for event in found] == [str(200 + place) for place in range(len(strangers))]
    assert all(words_ in event["reason"] for event, words_ in zip(found, strangers.values(), strict=True))
    assert all(grid.nodes[200 + place].asked == [] for place in range(len(strangers)))


def test_a_site_that_calls_itself_by_the_name_of_another(tmp_path, pairs):
    grid = crowd(tmp_path, [trial.site(0, tmp_path / "other", rounds=ROUNDS, **BRIEF).handle])
    for node, name in zip(grid.nodes.values(), trial.NAMES, strict=True):
        node.key = pairs[name]
    events = turned_away(grid, tmp_path, allowed={name: pairs[name] for name in trial.NAMES})
    (event,) = of(events, "refused")
    assert event["site"] == WEST
    assert "its key is that of 'west', and it calls itself 'north'" in event["reason"]


def with_token(handler: Callable[[RecordDict], RecordDict], token: Any) -> Callable[[RecordDict], RecordDict]:
    def handle(request: RecordDict) -> RecordDict:
        reply = handler(request)
        if request["allhands"]["kind"] == "hello" and token is not None:
            known = dict(reply["allhands"])
            proof = keys.prove(token, request["allhands"]["challenge"], known["site"]) if isinstance(token, str) else token
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
        None: "it has no token", "": "is not the one", "west-secret-0123456788": "is not the one",
        "north-secret-0123456789": "is not the one", b"west-secret-0123456789": "it has no token",
    }  # fmt: skip
    grid = crowd(tmp_path, [with_token(west, token) for token in cases])
    for client, name in enumerate(HONEST):
        grid.nodes[100 + client].handler = with_token(grid.nodes[100 + client].handler, f"{name}-secret-0123456789")
    events = turned_away(grid, tmp_path, tokens=tmp_path / "tokens")
    found = of(events, "refused")
    assert {event["site"] for event in found} == {WEST}
    assert len({event["reason"] for event in found}) == len(set(cases.values()))
    for reason in cases.values():
        assert any(reason in event["reason"] for event in found)
    assert "secret" not in (tmp_path / "events.jsonl").read_text()


def test_a_token_that_is_taken_away_ends_a_site_in_mid_run_and_one_that_is_given_lets_it_in(tmp_path, monkeypatch):
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
    assert [WEST in event["brought"] for event in of(events, "round_end")] == [True, True, False, False, True]
    (left,) = of(events, "left")
    assert left["site"] == WEST
    assert "there is no token of 'west'" in left["reason"]
    assert "secret" not in (tmp_path / "events.jsonl").read_text()
