"""One rank's part in operations that are agreed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from allhands.horovod import collectives
from allhands.horovod.handles import Handle
from allhands.horovod.operation_request import OperationRequest
from allhands.horovod.process_sets import ProcessSet


@dataclass
class LocalOperation:
    """What this rank has asked for; a rank that has joined makes one of zeros."""

    ask: OperationRequest
    set: ProcessSet
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    handle: Handle
    ready: Any = None  # a torch.cuda.Event behind what wrote the tensors
    made_set: ProcessSet | None = None


def zeros(ask: OperationRequest, process_set: ProcessSet, device: torch.device) -> LocalOperation:
    """The part of a rank that has joined, in what the others ask for. `device` is the rank's."""
    there = device if ask.device == "cuda" else torch.device("cpu")
    described = zip(ask.shapes, ask.dtypes, strict=True)
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=there) for shape, dtype in described
    ]
    return LocalOperation(ask, process_set, tensors, tensors, Handle(ask.kind))


def run(
    jobs: list[LocalOperation],
    entries: list[dict[str, Any]],
    active: int,
    buffers: collectives.Buffers,
) -> list[Any]:
    """Run operations on tensors, and return what each job's handle gives.

    Args:
        jobs: several allreduces of one sort, which travel as one, or one job of another kind.
        entries: what the coordinator says about each (`matcher.Matcher`).
        active: how many ranks have not joined.
        buffers: where fused tensors lie.
    """
    job, ask, process_set, entry = jobs[0], jobs[0].ask, jobs[0].set, entries[0]
    group, size = process_set.group, process_set.size()
    if ask.kind == "allreduce":
        tensors = [tensor for one in jobs for tensor in one.tensors]
        outputs = [output for one in jobs for output in one.outputs]
        collectives.allreduce(
            tensors, outputs, ask.op, ask.pre, ask.post, size, active, group, buffers
        )
        return [one.outputs for one in jobs]
    if ask.kind == "broadcast":
        collectives.broadcast(job.tensors, job.outputs, ask.root, group)
        return [job.outputs]
    if ask.kind == "allgather":
        return [collectives.allgather(job.tensors, entry["rows"], group)]
    if ask.kind == "alltoall":
        place = process_set.rank()
        received = torch.tensor([own[place] for own in entry["splits"]], dtype=torch.int32)
        return [(collectives.alltoall(job.tensors[0], entry["splits"], place, group), received)]
    if ask.kind == "reducescatter":
        whole = [torch.empty_like(tensor) for tensor in job.tensors]
        collectives.allreduce(
            job.tensors, whole, ask.op, ask.pre, ask.post, size, active, group, buffers
        )
        parts = [collectives.rows_of(len(tensor), size, process_set.rank()) for tensor in whole]
        return [
            [
                tensor[first : first + rows].clone()
                for tensor, (first, rows) in zip(whole, parts, strict=True)
            ]
        ]
    return [None]  # a barrier: that all have come is all there is to it
