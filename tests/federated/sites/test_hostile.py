"""Sites that answer something else than an update when they are asked to train, one by one: named
in the events with the reason, never in the average, and the server goes on."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from allhands.federated.sites.arrays import pack, unpack
from tests.federated.sites import across as trial
from tests.federated.sites.fake_grid import FakeGrid
from tests.federated.sites.hostile import (
    BRIEF,
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

LENGTH = sum(-(-numbers // 32) * 32 for numbers in (54, 9, 27, 3))  # of a row of the model


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
        reply["figures"] = MetricRecord(
            {name: value for name, value in kept.items() if value is not None}
        )

    return spoil


def words(**changed: Any) -> Callable[[RecordDict], None]:
    def spoil(reply: RecordDict) -> None:
        reply["allhands"] = ConfigRecord({**dict(reply["allhands"]), **changed})

    return spoil


def raw(
    data: bytes, stype: str = "numpy.ndarray", shape: tuple[int, ...] = (LENGTH,)
) -> Callable[[RecordDict], None]:
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
        given = {
            "update.places": np.asarray(places, np.int32),
            "update.values": np.ones(values, np.float32),
        }
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
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "<f4", "fortran_order": False, "shape": (2**60,)}
    )
    return stream.getvalue() + NOISE


Cases = dict[str, tuple[Callable[[RecordDict], Any], str]]
BAD: Cases = {
    "NaN": (update(at(3, math.nan)), "NaN in '0.weight'"),
    "Inf": (update(at(3, -math.inf)), "Inf in '0.weight'"),
    "a number between the weights": (update(at(60, 1.0)), "the gaps between weights"),
    "an enormous update": (update(lambda row: row * 1e8), "norm"),
    "the largest update that there is": (
        update(lambda row: torch.full_like(row, 3e38) * row.ne(0)),
        "norm",
    ),
    "a shorter row": (
        update(lambda row: torch.ones(LENGTH - 1)),
        f"'update' is [{LENGTH - 1}], and must be [{LENGTH}]",
    ),
    "a row too many": (update(lambda row: torch.ones(1, LENGTH)), f"[1, {LENGTH}]"),
    "another dtype": (
        update(lambda row: torch.ones(LENGTH, dtype=torch.float64)),
        "'update' is float64, and must be",
    ),
    "integers for weights": (
        update(lambda row: torch.ones(LENGTH, dtype=torch.int64)),
        "'update' is int64, and must be",
    ),
    "an array that nobody asked for": (
        lambda reply: reply.__setitem__(
            "update", pack({"update": torch.ones(LENGTH), "gift": torch.ones(1)})
        ),
        "it has an array 'gift' that was not asked for",
    ),
    "another name": (
        lambda reply: reply.__setitem__("update", pack({"weights": torch.ones(LENGTH)})),
        "no array 'update'",
    ),
    "random bytes": (raw((NOISE * LENGTH)[: 4 * LENGTH]), "cannot be read"),
    "no bytes": (raw(b""), "cannot be read"),
    "a cut array": (raw(numpy_bytes(np.zeros(LENGTH, np.float32))[:-9]), "cut off"),
    "a header that promises more than there is": (
        raw(bomb()),
        f"'update' is [{2**60}], and must be",
    ),
    "places beyond the row": (scattered([1, LENGTH], 2), "places of 'update' do not rise"),
    "places before the row": (scattered([-1, 3], 2), "places of 'update' do not rise"),
    "a place twice": (scattered([3, 3], 2), "places of 'update' do not rise"),
    "more numbers than places": (scattered([3], 2), "'update.values' is [2], and must be [1]"),
    "a pickle in NumPy's clothes": (
        raw(numpy_bytes(np.array([Trap()], object), allow_pickle=True)),
        "'update' is object",
    ),
    "a pickle": (raw(pickle.dumps(Trap()), "pickle"), "not one of NumPy's"),
    "no update": (without("update"), "no update"),
    "an update of another kind": (
        lambda reply: reply.__setitem__("update", ConfigRecord({"update": "yes"})),
        "no update",
    ),
    "more samples than it has": (
        figures(samples=3000.0),
        "trained on 3000 samples and said before that it has 3",
    ),
    "no samples": (figures(samples=0.0), "at least one"),
    "fewer than no samples": (figures(samples=-3.0), "at least one"),
    "samples that are no number": (figures(samples=math.nan), "samples=nan"),
    "other steps": (figures(steps=200.0), "took 200 steps, and 1 follow"),
    "a loss that is none": (figures(loss=math.nan), "loss=nan"),
    "no loss": (figures(loss=None), "no figure 'loss'"),
    "no figures": (without("figures"), "no figure 'samples'"),
}
FAILED: Cases = {
    "a reply of another round": (words(round=7), "another round or run"),
    "a reply of another run": (words(run="another"), "another round or run"),
    "an update without a word": (without("allhands"), ""),
    "nothing but a refusal": (words(status="refused", reason="no time today"), "no time today"),
    "a refusal without a reason": (words(status="refused", reason=7), ""),
    "a reply without anything": (
        lambda reply: [reply.__delitem__(name) for name in list(reply)],
        "",
    ),
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


def one_a_case(events: list[dict[str, Any]], cases: Cases) -> list[dict[str, Any]]:
    """What is said of west's updates: in each round one thing, with the reason of its case."""
    found = {event["round"]: event for event in of(events, "bad", "failed")}
    assert sorted(found) == list(range(len(cases)))
    for round_, (case, (_, reason)) in enumerate(cases.items()):
        assert found[round_]["site"] == WEST, case
        assert reason in found[round_]["reason"], case
    return list(found.values())


def test_no_update_enters_the_average_that_must_not(tmp_path, capsys):
    rounds = len(BAD)
    model, history, events = run(
        in_turn(tmp_path, [spoil for spoil, _ in BAD.values()]), tmp_path, rounds
    )
    assert all(event["kind"] == "bad" for event in one_a_case(events, BAD))
    assert history["skipped"] == [["west"]] * rounds
    assert f"site {WEST} is left out" in capsys.readouterr().out
    finished(events, history, rounds)
    assert trial.same(model, reference(rounds, True))
    assert "ALLHANDS_TRAP" not in os.environ


def test_replies_that_are_no_answers(tmp_path):
    rounds = len(FAILED)
    model, history, events = run(
        in_turn(tmp_path, [spoil for spoil, _ in FAILED.values()]), tmp_path, rounds
    )
    assert all(event["reason"] for event in one_a_case(events, FAILED))
    finished(events, history, rounds)
    assert trial.same(model, reference(rounds, True))


def test_a_set_bound_of_the_norm_is_kept(tmp_path):
    longer = update(lambda row: row * (20 / torch.linalg.vector_norm(row)))
    model, history, events = run(in_turn(tmp_path, [longer] * ROUNDS), tmp_path, max_norm=19.0)
    assert ["sites.max_norm is 19" in event["reason"] for event in of(events, "bad")] == [
        True
    ] * ROUNDS
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, True))


def test_an_update_that_was_not_clipped_would_break_the_guarantee(tmp_path):
    clip = {"clip": 0.05, "noise_multiplier": 0.0, "sampling": "fixed"}
    options = {"algorithm": {"name": "fedavg", "weighted": False}, "privacy": clip}
    grid, longer = (
        trial.grid(tmp_path, rounds=ROUNDS, **BRIEF, **options),
        update(lambda row: row * 2),
    )
    grid.nodes[NODE].spoil = lambda kind, reply: (
        longer(reply) or reply if kind == "train" else reply
    )
    _, history, events = run(grid, tmp_path, options=options)
    bad = of(events, "bad")
    assert [(event["site"], event["round"]) for event in bad] == [
        (WEST, round_) for round_ in range(ROUNDS)
    ]
    assert all(
        "the norm 0.1, and privacy's clip is 0.05: it has not clipped it" in event["reason"]
        for event in bad
    ), bad
    assert all(event["norm"] <= 0.05 * 1.00001 for event in of(events, "update"))
    finished(events, history)


def test_a_bad_update_ends_the_run_where_it_shall(tmp_path):
    from allhands.federated.rounds import BadUpdateError

    with pytest.raises(
        BadUpdateError,
        match=r"round 0: site west: its update has NaN in '0.weight'.*sites.on_bad='skip'",
    ):
        run(in_turn(tmp_path, [BAD["NaN"][0]]), tmp_path, on_bad="stop")


def test_an_error_is_named_by_its_last_line(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    grid.nodes[NODE].fails = {
        "train": "Traceback (most recent call last):\n  File …\nValueError: \x1b[2Jno scanner "
        "today\n"
    }
    model, history, events = run(grid, tmp_path)
    assert [event["reason"] for event in of(events, "failed")] == [
        "ValueError:  [2Jno scanner today"
    ] * ROUNDS
    assert history["failed"] == [["west"]] * ROUNDS
    finished(events, history)
    assert trial.same(model, reference(ROUNDS, True))


def test_nothing_at_all(tmp_path):
    grid = trial.grid(tmp_path, rounds=ROUNDS, **BRIEF)
    grid.nodes[NODE].loses = {"train"}
    model, history, events = run(grid, tmp_path, round_timeout=2.0)
    assert [(event["site"], event["round"]) for event in of(events, "late")] == [
        (WEST, 0),
        (WEST, 1),
    ]
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
        (
            figures(count=1e6, classed=1e6),
            "measured 1e+06 test samples and said before that it has 5",
        ),
        (without("figures"), "count=None"),
    ]
    made, left = trial.grid(tmp_path, rounds=len(cases), **BRIEF, **options), iter(cases)
    made.nodes[101].spoil = lambda kind, reply: (
        next(left)[0](reply) or reply if kind == "evaluate" else reply
    )
    _, history, events = run(made, tmp_path, len(cases), options)
    failed = of(events, "failed")
    assert [event["site"] for event in failed] == ["east"] * len(cases)
    assert all(
        reason in event["reason"] for event, (_, reason) in zip(failed, cases, strict=True)
    ), failed
    assert len(history["clients"]["loss"]) == len(cases)
    assert all(math.isfinite(loss) for loss in history["clients"]["loss"])
