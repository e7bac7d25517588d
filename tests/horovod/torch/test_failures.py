"""An operation that fails on one rank after all have agreed on it is told to the others by name."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import allhands.horovod.torch as hvd
from allhands.horovod import collectives, lanes
from tests.horovod.torch.refusals import failed
from tests.horovod.torch.rounds_worlds import Three, inputs, step_of
from tests.patience import patience
from tests.worlds import in_world

pytestmark = pytest.mark.serial
SIZE = 3
CALLS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(torch.ones(3), name="x"),
    "allgather": lambda: hvd.allgather(torch.ones(hvd.rank(), 2), name="x"),
    "broadcast": lambda: hvd.broadcast(torch.ones(3), 2, name="x"),
    "alltoall": lambda: hvd.alltoall(torch.ones(6), name="x"),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(6), name="x"),
}
WHERE = list(zip(CALLS, (0, 1, 2, 1, 0), strict=True))


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("only here")


def failing_on(rank: int, kind: str) -> list[Any]:
    """What the others wait in fails on this rank; then what all are told, and the time it took."""
    inner = "allreduce" if kind == "reducescatter" else kind
    began = time.monotonic()
    if hvd.rank() == rank:
        with mock.patch.object(collectives, inner, fail):  # a Mock would keep the connections
            text = failed(CALLS[kind])
    else:
        text = failed(CALLS[kind])
    took = time.monotonic() - began
    following = failed(lambda: hvd.allreduce(torch.ones(1), name="following"))
    hvd.shutdown()
    hvd.init()
    return [text, following, took, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()]


def without_memory() -> str:
    rows = torch.ones(8_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    if hvd.rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, hard))
    try:
        return failed(lambda: hvd.allgather(rows, name="rows"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def in_a_round() -> str:
    net = Three()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters(),
        groups=[[net.a], [net.b], [net.c]],
    )
    for step in range(10):
        step_of(net, optimizer, inputs(hvd.rank(), step), "cba")
    hvd.barrier()
    if hvd.rank() == 2:
        lanes.Lane.begin = broken_begin(lanes.Lane.begin)  # type: ignore[method-assign]
    return failed(lambda: step_of(net, optimizer, inputs(hvd.rank(), 0), "cba"))


def broken_begin(begin: Callable[..., None]) -> Callable[..., None]:
    def run(lane: lanes.Lane, tensor: torch.Tensor, of: lanes.Round) -> None:
        if len(of.works) == 1:
            with mock.patch.object(lanes.dist, "all_reduce", fail):
                begin(lane, tensor, of)
        else:
            begin(lane, tensor, of)

    return run


def everything() -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {f"{kind} on {rank}": failing_on(rank, kind) for kind, rank in WHERE}
    found["without memory"] = without_memory()
    hvd.shutdown()
    hvd.init()
    found["in a round"] = in_a_round()
    hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return in_world(SIZE, everything)


@pytest.mark.parametrize(("kind", "rank"), WHERE)
def test_all_ranks_are_told_which_operation_failed_where(
    world: list[dict[str, Any]], kind: str, rank: int
) -> None:
    for found in world:
        text, following, took, after = found[f"{kind} on {rank}"]
        assert text == f"{kind} 'x' failed on rank {rank}: ValueError: only here"
        assert following == text
        assert took < patience(5)
        assert after == SIZE, "after shutdown and init all work together again"


def test_a_rank_without_memory_is_named(world: list[dict[str, Any]]) -> None:
    texts = {found["without memory"] for found in world}
    assert len(texts) == 1
    assert texts.pop().startswith("allgather 'rows' failed on rank 1: RuntimeError: ")


def test_a_gradient_that_fails_in_a_round_is_named(world: list[dict[str, Any]]) -> None:
    texts = {found["in a round"] for found in world}
    assert len(texts) == 1
    assert "failed on rank 2: ValueError: only here" in texts.pop()
