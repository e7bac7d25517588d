"""Training whose gradients travel as rounds computes what one process does; what changes after many
equal steps is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import allhands.horovod.torch as hvd
from allhands.errors import UserError
from allhands.horovod import engine, lanes
from tests.patience import patience
from tests.worlds import in_world

pytestmark = pytest.mark.serial
SIZE, STEPS = 3, 50


def failed(call: Callable[[], Any]) -> str:
    try:
        call()
    except hvd.HorovodInternalError as error:
        return str(error)
    return "nothing failed"


class Counted:
    """How many buckets left as parts of a round."""

    number = 0

    def __init__(self) -> None:
        begin = lanes.Lane.begin

        def counted(lane: lanes.Lane, tensor: torch.Tensor, of: lanes.Round) -> None:
            self.number += 1
            begin(lane, tensor, of)

        lanes.Lane.begin = counted  # type: ignore[method-assign]


class Three(nn.Module):
    """Three parameters that need not all be used, nor in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.full((2,), float(number))) for number in range(1, 4)
        )


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.full((2,), 1.0 + rank + (step % 5) / 10)


def step_of(net: Three, optimizer: Any, x: torch.Tensor, names: str) -> None:
    optimizer.zero_grad()
    for name in names:
        ((getattr(net, name) - x) ** 2).sum().backward()
    optimizer.step()


def by_hand(
    used: Callable[[int, int], str], ranks: tuple[int, ...], steps: int
) -> list[list[float]]:
    """One process: `used` says which parameters a rank uses in a step."""
    net = Three()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            for name in used(rank, step):
                (((getattr(net, name) - inputs(rank, step)) ** 2).sum() / len(ranks)).backward()
        optimizer.step()
    return [param.tolist() for param in net.parameters()]


def train(
    used: Callable[[int, int], str],
    steps: int = STEPS + 10,
    process_set: Any = None,
    **options: Any,
) -> list[list[float]]:
    net = Three()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
    options = {
        "groups": [[net.a], [net.b], [net.c]],
        "process_set": process_set or hvd.global_process_set,
        **options,
    }
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    for step in range(steps):
        step_of(net, optimizer, inputs(hvd.rank(), step), used(hvd.rank(), step))
    return [param.tolist() for param in net.parameters()]


def always(rank: int, step: int) -> str:
    return "cba"


def other_order(rank: int, step: int) -> str:
    return "abc" if step >= STEPS and rank == 1 else "cba"


def left_out_once(rank: int, step: int) -> str:
    return "ca" if step == STEPS and rank == 1 else "cba"


def left_out_by_all(rank: int, step: int) -> str:
    return "ca" if step == STEPS else "cba"


def nothing_once(rank: int, step: int) -> str:
    return "" if step == STEPS and rank == 2 else "cba"


def uneven(rank: int, step: int) -> str:
    return "cba" if step < STEPS + 3 * rank else ""


CASES = (always, other_order, left_out_once, left_out_by_all, nothing_once)


def changed_shape() -> tuple[str, float]:
    net = Three()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), groups=3
    )
    for step in range(STEPS):
        step_of(net, optimizer, inputs(0, step), "cba")
    if hvd.rank() == 1:
        net.b.data = torch.zeros(5)
        net.b.grad = None
    x = inputs(0, 0) if hvd.rank() != 1 else torch.zeros(())
    text = failed(lambda: step_of(net, optimizer, x, "cba"))
    return text, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def more_parameters() -> list[float]:
    net, more = Three(), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    for step in range(10):
        step_of(net, optimizer, inputs(0, step), "cba")
    optimizer.add_param_group({"params": [more]})
    for step in range(10):
        optimizer.zero_grad()
        (
            sum((getattr(net, name) - inputs(0, step)).square().sum() for name in "abc")
            + (more * hvd.rank()).sum()
        ).backward()
        optimizer.step()
    return more.tolist()


def with_join() -> tuple[list[list[float]], int]:
    steps = STEPS + 3 * hvd.rank()
    net = Three()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5),
        net.named_parameters(),
        groups=2,
    )
    for step in range(steps):
        step_of(net, optimizer, inputs(hvd.rank(), step), "cba")
    last = hvd.join()
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    return [param.tolist() for param in net.parameters()], last


def two_optimizers() -> list[list[float]]:
    """Both backward passes come before both steps, and the ranks do them in another order; at last,
    one rank does so alone."""
    one, other = Three(), Three()
    nets = {"one": one, "other": other}
    optimizers = {}
    for name, net in nets.items():
        named = [(f"{name}.{own}", param) for own, param in net.named_parameters()]
        optimizers[name] = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), named
        )
    for step in range(30):
        order = ["one", "other"] if hvd.rank() or step < 10 else ["other", "one"]
        for name in order:
            if step >= 20 and hvd.rank() and name == "other":
                optimizers["one"].step()
            optimizers[name].zero_grad()
            sum(
                (param - inputs(hvd.rank(), step)).square().sum()
                for param in nets[name].parameters()
            ).backward()  # type: ignore[union-attr]
        for name in order if step < 20 or not hvd.rank() else ["other"]:
            optimizers[name].step()
    return [param.tolist() for net in nets.values() for param in net.parameters()]


def turns_sparse() -> tuple[list[bool], list[list[float]]]:
    """A gradient that was dense for many steps is sparse in some."""
    table = nn.Parameter(torch.ones(5, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=0.1), [("table", table)])
    found = []
    for step in range(STEPS + 10):
        optimizer.zero_grad()
        rows = torch.tensor([hvd.rank(), 4])
        nn.functional.embedding(
            rows, table, sparse=step in (STEPS, STEPS + 1, STEPS + 2)
        ).sum().backward()
        optimizer.step()
        assert table.grad is not None
        found.append(table.grad.is_sparse)
    return found, table.tolist()


def calls_by_name() -> dict[str, Any]:
    """Not of an optimizer: the same names in the same order, and then not."""
    rank = hvd.rank()

    def step(names: str, shape: int = 2) -> list[float]:
        handles = {
            name: hvd.allreduce_async(torch.full((shape,), float(ord(name))), name=name, op=hvd.Sum)
            for name in names
        }
        return [hvd.synchronize(handles[name])[0].item() for name in sorted(names)]

    for _ in range(STEPS):
        step("xyz")
    found: dict[str, Any] = {"order": step("xyz"[rank:] + "xyz"[:rank])}
    found["shape"] = failed(lambda: step("x", 3 if rank == 2 else 2))
    found["after"] = step("xyz")
    return found


def busy() -> str:
    net = Three()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    for step in range(10):
        step_of(net, optimizer, inputs(0, step), "cba")
    (net.a * 2).sum().backward()
    try:
        hvd.join()
        text = "nothing was refused"
    except UserError as error:
        text = str(error)
    optimizer.step()
    return text


def everything() -> dict[str, Any]:
    counted = Counted()
    hvd.init()
    found: dict[str, Any] = {}
    for case in CASES:
        before = counted.number
        found[case.__name__] = (train(case), counted.number - before)
    before = counted.number
    found["fp16"] = train(left_out_by_all, compression=hvd.Compression.bf16)
    found["predivided"] = train(left_out_once, gradient_predivide_factor=2.0)
    found["two passes"] = train(always, process_set=None, backward_passes_per_step=1, groups=1)
    found["min"] = train(always, op=hvd.Min)
    found["join"] = with_join()
    outer = hvd.add_process_set([0, 2])
    before = counted.number
    found["set"] = train(always, process_set=outer) if outer.included() else None
    found["in the set"] = counted.number - before
    hvd.remove_process_set(outer)
    found["shape"] = changed_shape()
    found["more"] = more_parameters()
    found["two"] = two_optimizers()
    found["sparse"] = turns_sparse()
    found["names"] = calls_by_name()
    found["busy"] = busy()
    hvd.shutdown()
    hvd.init()
    before = counted.number
    found["again"] = (train(always, steps=10), counted.number - before)
    hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return in_world(SIZE, everything)


def same(found: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_changes_after_many_equal_steps_is_computed_as_in_one_process(
    case: Any, world: list[dict[str, Any]]
) -> None:
    wanted = by_hand(case, (0, 1, 2), STEPS + 10)
    for found, left in (rank[case.__name__] for rank in world):
        same(found, wanted)
        assert left > 3 * (STEPS - 10), "the buckets left by their names"


def test_options(world: list[dict[str, Any]]) -> None:
    for found in world:
        same(found["fp16"], by_hand(left_out_by_all, (0, 1, 2), STEPS + 10), 5e-2)
        same(found["predivided"], by_hand(left_out_once, (0, 1, 2), STEPS + 10))
        same(found["two passes"], by_hand(always, (0, 1, 2), STEPS + 10))
    assert all(found["min"] == world[0]["min"] for found in world)


def test_ranks_that_join_after_many_steps(world: list[dict[str, Any]]) -> None:
    net = Three()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(STEPS + 6):
        optimizer.zero_grad()
        for rank in range(3):
            for name in uneven(rank, step):
                (((getattr(net, name) - inputs(rank, step)) ** 2).sum() / 3).backward()
        optimizer.step()
    for found, last in (rank["join"] for rank in world):
        assert last == 2
        same(found, [param.tolist() for param in net.parameters()])


def test_a_process_set_has_rounds_of_its_own(world: list[dict[str, Any]]) -> None:
    wanted = by_hand(always, (0, 2), STEPS + 10)
    for rank in (0, 2):
        same(world[rank]["set"], wanted)
        assert world[rank]["in the set"] > 3 * (STEPS - 10)
    assert world[1]["in the set"] == 0


def test_a_shape_that_changes_on_one_rank_is_an_error_on_all(world: list[dict[str, Any]]) -> None:
    for text, after in (rank["shape"] for rank in world):
        assert "'b'" in text
        assert (
            "ranks 0, 2 gave shape [2], rank 1 gave shape [5]; all ranks must give the same" in text
        )
        assert after == 3.0


def test_parameters_that_come_later_travel_too(world: list[dict[str, Any]]) -> None:
    for found in (rank["more"] for rank in world):
        # Ten steps of 0.1 times the mean of 0, 1, 2.
        torch.testing.assert_close(torch.tensor(found), torch.tensor([-1.0]))


def test_two_optimizers_whose_steps_overlap(world: list[dict[str, Any]]) -> None:
    net = Three()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        for rank in range(3):
            (
                sum((param - inputs(rank, step)).square().sum() for param in net.parameters()) / 3
            ).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found in (rank["two"] for rank in world):
        same(found, [param.tolist() for param in net.parameters()] * 2)


def test_a_gradient_that_becomes_sparse_stays_so(world: list[dict[str, Any]]) -> None:
    steps = STEPS + 10
    for sparse, table in (rank["sparse"] for rank in world):
        assert [step for step in range(steps) if sparse[step]] == [STEPS, STEPS + 1, STEPS + 2]
        wanted = [[1 - 0.1 * steps / 3] * 2] * 3 + [[1.0] * 2] + [[1 - 0.1 * steps] * 2]
        torch.testing.assert_close(torch.tensor(table), torch.tensor(wanted), atol=1e-5, rtol=0)


def test_names_in_another_order_after_many_steps_and_another_shape(
    world: list[dict[str, Any]],
) -> None:
    for found in (rank["names"] for rank in world):
        assert found["order"] == found["after"] == [3.0 * ord(name) for name in "xyz"]
        assert "allreduce 'x': ranks 0, 1 gave shape [2], rank 2 gave shape [3]" in found["shape"]


def test_join_before_the_step_is_refused(world: list[dict[str, Any]]) -> None:
    assert all("join() between backward() and step()" in rank["busy"] for rank in world)


def test_another_engine_begins_anew(world: list[dict[str, Any]]) -> None:
    for found, left in (rank["again"] for rank in world):
        same(found, by_hand(always, (0, 1, 2), 10))
        assert left == 3 * 7


def broken_promise(dies: bool) -> tuple[str, float]:
    """After many steps rank 1 begins a backward pass and does not end it."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "7"
    hvd.init()
    net = Three()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        net.named_parameters(),
        groups=[[net.a], [net.b], [net.c]],
    )
    for step in range(STEPS):
        step_of(net, optimizer, inputs(0, step), "cba")
    began = time.monotonic()
    if hvd.rank() == 1:
        net.c.sum().backward()
        if dies:
            hvd.shutdown()
            return "", 0.0
        while not engine.current()._broken and time.monotonic() < began + 60:
            time.sleep(0.05)
    text = failed(
        lambda: (
            step_of(net, optimizer, inputs(0, 0), "cba") if hvd.rank() != 1 else optimizer.step()
        )
    )
    took = time.monotonic() - began
    hvd.shutdown()
    return text, took


@pytest.mark.parametrize("dies", [False, True])
def test_a_step_that_one_rank_does_not_end_is_an_error_and_no_hang(
    dies: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    # A rank that leaves may have done so before the others promised.
    why = "has called shutdown()" if dies else "and 2 more of its round: all ranks began it"
    for rank, (text, took) in enumerate(in_world(SIZE, broken_promise, dies)):
        if dies and rank == 1:
            continue
        assert "allreduce 'gradients.0.a'" in text
        assert why in text
        assert "rank 1" in text
        assert took < patience(30)
