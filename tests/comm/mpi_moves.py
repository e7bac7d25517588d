"""Probes of the mpi backend: data that moves between ranks; part of mpi_probes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm import mpi_probes
from tests.comm.mpi_probes import data, equal, everybody, probe


@probe
def reduce_to_each_root() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    for root in range(size):
        tensor = data(own)
        dist.reduce(tensor, root, ReduceOp.MAX)
        equal(tensor, torch.stack(everybody()).amax(0) if root == own else data(own))


@probe
def gathers() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    parts = [torch.empty(5) for _ in range(size)]
    dist.all_gather(parts, data(own))
    equal(torch.stack(parts), torch.stack(everybody()))
    out = torch.empty(size, 5)
    dist.all_gather_into_tensor(out, data(own))
    equal(out, torch.stack(everybody()))
    out = torch.zeros(size * 5)  # as FSDP2 does: from its own place
    out[own * 5 : (own + 1) * 5] = data(own)
    dist.all_gather_into_tensor(out, out[own * 5 : (own + 1) * 5])
    equal(out, torch.cat(everybody()))
    for root in range(size):
        parts = [torch.empty(5) for _ in range(size)] if root == own else []
        dist.gather(data(own), parts or None, dst=root)
        if root == own:
            equal(torch.stack(parts), torch.stack(everybody()))
        came = torch.empty(5)
        dist.scatter(
            came, [data(rank + 10) for rank in range(size)] if root == own else None, src=root
        )
        equal(came, data(own + 10))


@probe
def reduce_scatters() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN):
        stacked = torch.stack([data(rank, 5 * size) for rank in range(size)])
        expected = {
            ReduceOp.SUM: stacked.sum(0),
            ReduceOp.AVG: stacked.mean(0),
            ReduceOp.MIN: stacked.amin(0),
        }[op]
        part = torch.empty(5)
        dist.reduce_scatter_tensor(part, data(own, 5 * size), op)
        torch.testing.assert_close(part, expected[own * 5 : (own + 1) * 5])
        part = torch.empty(5)
        dist.reduce_scatter(part, list(data(own, 5 * size).chunk(size)), op)
        torch.testing.assert_close(part, expected[own * 5 : (own + 1) * 5])
    whole = data(own, 5 * size)
    dist.reduce_scatter_tensor(whole[own * 5 : (own + 1) * 5], whole)
    equal(whole[own * 5 : (own + 1) * 5], stacked.sum(0)[own * 5 : (own + 1) * 5])


@probe
def all_to_alls() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    parts = [torch.empty(3) for _ in range(size)]
    dist.all_to_all(parts, [torch.full((3,), own * 10.0 + rank) for rank in range(size)])
    equal(torch.stack(parts)[:, 0], torch.tensor([rank * 10.0 + own for rank in range(size)]))
    parts = [
        torch.empty(rank, 2) for rank in range(size)
    ]  # rank r sends r rows to everybody, rank 0 none
    dist.all_to_all(parts, [torch.full((own, 2), float(own)) for _ in range(size)])
    for rank, part in enumerate(parts):
        equal(part, torch.full((rank, 2), float(rank)))
    out = torch.empty(size * 2)
    dist.all_to_all_single(out, torch.arange(size * 2.0) + 100 * own)
    equal(
        out,
        torch.cat([torch.arange(own * 2.0, own * 2 + 2) + 100 * rank for rank in range(size)]),
    )
    sends = [(own + rank) % size for rank in range(size)]  # the same both ways
    rows = torch.arange(sum(sends) * 2.0).view(-1, 2) + 100 * own
    out = torch.empty(sum(sends), 2)
    dist.all_to_all_single(out, rows, sends, sends)
    for rank, part in enumerate(out.split(sends)):
        theirs = [(rank + other) % size for other in range(size)]
        equal(part, (torch.arange(sum(theirs) * 2.0).view(-1, 2) + 100 * rank).split(theirs)[own])


@probe
def coalesced() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    tensors = [data(own, 3), data(own, 4).view(2, 2)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    equal(tensors[0], torch.stack(everybody(3)).sum(0))
    equal(tensors[1], torch.stack(everybody(4)).sum(0).view(2, 2))
    group = dist.group.WORLD
    outs, parts = [torch.empty(size * 3), torch.empty(size * 2)], [torch.empty(1), torch.empty(2)]
    for names, outputs, inputs in (
        (
            ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
            outs,
            [data(own, 3), data(own, 2)],
        ),
        (
            ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
            parts,
            [data(own, size), data(own, 2 * size)],
        ),
    ):
        for name in names:
            getattr(group, name)(outputs, inputs).wait()
    equal(outs[0], torch.cat(everybody(3)))
    equal(outs[1], torch.cat(everybody(2)))
    equal(parts[0], torch.stack(everybody(size)).sum(0)[own : own + 1])
    equal(parts[1], torch.stack(everybody(2 * size)).sum(0)[2 * own : 2 * own + 2])


@probe
def functional_collectives() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    equal(functional.all_reduce(data(own), "sum", group) + 0, torch.stack(everybody()).sum(0))
    equal(functional.all_gather_tensor(data(own), 0, group) + 0, torch.cat(everybody()))
    found = functional.reduce_scatter_tensor(data(own, 2 * size), "sum", 0, group) + 0
    equal(found, torch.stack(everybody(2 * size)).sum(0)[2 * own : 2 * own + 2])
    found = functional.all_to_all_single(torch.arange(size * 1.0) + 10 * own, None, None, group) + 0
    equal(found, torch.tensor([10.0 * rank + own for rank in range(size)]))
    equal(functional.broadcast(data(own), 1, group) + 0, data(1))


@probe
def objects() -> None:
    own, size = mpi_probes.RANK, mpi_probes.SIZE
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": own, "text": "x" * (own + 1)})
    assert [entry["rank"] for entry in found] == list(range(size))
    told = ["from 1" if own == 1 else None]
    dist.broadcast_object_list(told, 1)
    assert told == ["from 1"]
