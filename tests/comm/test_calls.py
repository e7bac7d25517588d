"""Ranks that disagree about what to call are told so in seconds; a rank that is only slow is left
alone."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allhands
from allhands.comm import calls
from allhands.errors import WorkerError
from allhands.launch import spawn, worker
from allhands.world import World
from tests.patience import patience
from tests.worlds import in_world

QUICK = {"every": 0.1, "quiet": 0.3, "late": 1.0}
GIVES_UP = timedelta(seconds=2.5)
FIX = (
    "Every rank must make the same calls in the same order: call it on all ranks, without `if "
    "rank == 0`"
)


def here() -> World:
    world = allhands.current_world()
    assert world is not None
    return world


def watched(body: Callable[[int], Any]) -> dict[str, Any]:
    """What a rank's watcher said during ``body(rank)``, and after how many seconds."""
    said: list[str] = []
    at: list[float] = []
    stderr, sys.stderr = sys.stderr, io.StringIO()
    started = time.monotonic()

    def hear(message: str) -> None:
        said.append(message)
        at.append(time.monotonic() - started)

    error = None
    try:
        with calls.watch(here(), hear, **QUICK):
            body(here().rank)
    except (
        RuntimeError,
        LookupError,
    ) as raised:  # a collective that gave up, or what the body raises on purpose
        error = type(raised).__name__
    finally:
        seconds = time.monotonic() - started
        printed, sys.stderr = sys.stderr.getvalue(), stderr
    dist.barrier()  # on the default group, which must still be whole
    return {"said": said, "at": at, "printed": printed, "error": error, "seconds": seconds}


def step(number: int) -> None:
    calls.note(("step", number))
    dist.all_reduce(torch.ones(2))


def blocked(group: Any) -> None:
    """A collective for which the other ranks never come; gloo gives up after the group's
    timeout."""
    dist.all_reduce(torch.ones(2), group=group)


def saves_alone(rank: int, group: Any) -> None:
    step(12)
    if rank == 0:
        calls.position(("in", "Saver.on_step_end"))
        calls.note("save checkpoint at step 12")
    else:
        calls.note(("step", 13))
    try:
        blocked(group)
    finally:
        calls.position("")


def leaves_early(rank: int, group: Any) -> None:
    step(1)
    if rank != 2:
        calls.note(("step", 2))
        blocked(group)


def fails_alone(rank: int, group: Any) -> None:
    step(1)
    if rank == 2:
        raise LookupError("no such class")
    calls.note(("step", 2))
    blocked(group)


def returns_at_once(rank: int, group: Any) -> None:
    """Rank 0's call does not block it, and it computes for a while: the others' waiting finds
    it."""
    calls.note("announce" if rank == 0 else "evaluate")
    if rank == 0:
        time.sleep(1.5)
    else:
        blocked(group)


def comes_late(rank: int) -> None:
    step(1)
    if rank == 1:
        time.sleep(2)
    step(2)
    step(3)


def ends_late(rank: int) -> None:
    step(1)
    if rank == 1:
        time.sleep(1)


def everything() -> dict[str, Any]:
    """Several trainings in a row in one world."""
    rank = here().rank
    found = {"late": watched(comes_late), "ends_late": watched(ends_late)}
    for scenario in (saves_alone, leaves_early, fails_alone, returns_at_once):
        # A group of its own, in which a rank that does something else never calls anything.
        other = dist.new_group([0, 1, 2], timeout=GIVES_UP)
        own = dist.new_group([0, 1, 2], timeout=GIVES_UP)
        group = own if scenario is saves_alone and rank == 0 else other
        found[scenario.__name__] = watched(
            lambda rank, scenario=scenario, group=group: scenario(rank, group)
        )
    found["at the end"] = watched(lambda rank: [step(number) for number in range(600)] and None)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return in_world(3, everything)


def line_of(text: str, occurrence: int = 0) -> int:
    lines = Path(__file__).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.strip() == text][occurrence]


@pytest.mark.serial
def test_a_call_of_one_rank_alone_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    wait = f"{__file__}:{line_of('dist.all_reduce(torch.ones(2), group=group)')} in blocked"
    for found in ranks:
        told = found["saves_alone"]
        assert told["said"] == [
            "the ranks do not make the same calls: rank 0 is in 'save checkpoint at step 12' "
            f"({wait}; in Saver.on_step_end) "
            f"while ranks 1, 2 are in 'step 13' ({wait}), after 'step 12' on all ranks. {FIX}"
        ]
        assert told["at"][0] < 2, "well before the collective itself gives up"
        assert told["error"] == "RuntimeError", "it was blocked in a collective"


@pytest.mark.serial
def test_a_rank_that_has_left_is_named_where_others_wait_for_it(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in (0, 1):
        for scenario, why in (
            ("leaves_early", ""),
            ("fails_alone", " with LookupError: no such class"),
        ):
            (message,) = ranks[rank][scenario]["said"]
            assert message.startswith(
                f"rank 2 has left after 'step 1'{why}, while rank {rank} is in 'step 2' "
                f"({__file__}:"
            )
            assert message.endswith(
                "for which all 3 ranks are needed: let all ranks leave at the same place"
            )
    assert [ranks[2][scenario]["said"] for scenario in ("leaves_early", "fails_alone")] == [[], []]


@pytest.mark.serial
def test_a_different_call_that_does_not_block_is_found_by_those_that_wait(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in (1, 2):
        (message,) = ranks[rank]["returns_at_once"]["said"]
        assert message.startswith("the ranks do not make the same calls: rank 0 is in 'announce' (")
        assert "while ranks 1, 2 are in 'evaluate' (" in message


@pytest.mark.serial
def test_a_slow_rank_is_no_error_and_is_named_once_with_its_line(
    ranks: list[dict[str, Any]],
) -> None:
    assert [(found["late"]["said"], found["late"]["error"]) for found in ranks] == [([], None)] * 3
    printed = [found["late"]["printed"] for found in ranks]
    assert printed[1] == ""
    assert re.fullmatch(
        r"allhands: rank [02] has waited [12] s in 'step 2' for rank 1: rank 1 is at "
        rf"{re.escape(__file__)}:"
        rf"{line_of('time.sleep(2)')} in comes_late; waiting on\n",
        "".join(printed),
    )


@pytest.mark.serial
def test_later_trainings_do_not_see_what_earlier_ones_left(ranks: list[dict[str, Any]]) -> None:
    nothing = {"said": [], "at": [], "printed": "", "error": None}
    for found in ranks:
        for scenario in ("ends_late", "at the end"):
            assert {name: found[scenario][name] for name in nothing} == nothing


@pytest.mark.serial
def test_rank_0_which_may_host_the_store_leaves_after_the_others(
    ranks: list[dict[str, Any]],
) -> None:
    assert 1 <= ranks[0]["ends_late"]["seconds"] < 4
    assert ranks[2]["ends_late"]["seconds"] < 1


def with_the_fault() -> None:
    """As a training does it: nothing but a callback on rank 0 differs, and no collective gives up
    before ten minutes."""
    world = allhands.init(device="cpu")
    with calls.watch(world, worker.fail):
        step(1)
        if world.rank == 0:
            calls.note("gather state")
        else:
            calls.note(("step", 2))
        dist.barrier() if world.rank == 0 else dist.recv(torch.ones(1), 0)


@pytest.mark.serial
def test_the_job_ends_within_seconds_and_the_message_is_its_error() -> None:
    started = time.monotonic()
    with pytest.raises(
        WorkerError,
        match=r"raised allhands.errors.WorldError: the ranks do not make the same calls",
    ) as raised:
        spawn(with_the_fault, workers=2)
    assert time.monotonic() - started < patience(45), "five seconds for it, the rest for the start"
    text = str(raised.value)
    assert "rank 0 is in 'gather state' (" in text
    assert "while rank 1 is in 'step 2' (" in text
    assert FIX in text
    assert (
        f'File "{__file__}", line '
        f"{line_of('dist.barrier() if world.rank == 0 else dist.recv(torch.ones(1), 0)')}" in text
    )
    assert "worker.py" not in text
    assert raised.value.exit_code == 1


def in_a_file(path: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    allhands.init("gloo", init_method=f"file://{path}", rank=rank, world_size=2, device="cpu")
    try:
        group = dist.new_group([0, 1], timeout=GIVES_UP)
        own = dist.new_group([0, 1], timeout=GIVES_UP)
        return watched(lambda rank: saves_alone(rank, own if rank == 0 else group))
    finally:
        allhands.finalize()


@pytest.mark.serial
def test_the_store_may_be_a_file(tmp_path: Path) -> None:
    for found in spawn(in_a_file, (str(tmp_path / "store"),), workers=2):
        (message,) = found["said"]
        assert "rank 0 is in 'save checkpoint at step 12' (" in message
        assert "while rank 1 is in 'step 13' (" in message


def test_a_world_of_one_is_left_alone() -> None:
    alone = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
    before = set(sys._current_frames())
    with calls.watch(alone, pytest.fail) as watcher:
        calls.note("step")
        assert set(sys._current_frames()) == before
    watcher.stop()
