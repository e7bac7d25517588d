"""What three ranks train in the worlds of test_rounds, and the same by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import allhands.horovod.torch as hvd
from allhands.horovod import engine, lanes
from tests.horovod.torch.refusals import failed
from tests.refusals import refused

SIZE, STEPS = 3, 50


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
    text = refused(hvd.join)
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
