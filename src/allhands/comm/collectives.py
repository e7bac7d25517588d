"""Collectives on trees of tensors, each a no-op in a world of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm.flat_layout import fused, joined
from allhands.errors import WorldError
from allhands.world import World

# Stands before a string, so that what another call sends is not taken for one.
_TEXT = b"text:"
_MESSAGE = 25 * 2**20  # bytes of tensors that travel together

# Every rank's tensor, one after the other in one; PyTorch 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce_sum(values: Sequence[torch.Tensor], world: World) -> None:
    """Sum tensors over all ranks in place, fused into one message a dtype."""
    if world.world_size == 1 or not values:
        return
    for flat in fused(values):
        dist.all_reduce(flat)


def sums_of_ranks(numbers: Iterable[Any], world: World) -> list[float]:
    """What numbers, or tensors of one, add up to over all ranks."""
    totals = torch.stack(
        [
            torch.as_tensor(number, dtype=torch.float64, device=world.device).reshape(())
            for number in numbers
        ]
    )
    all_reduce_sum([totals], world)
    found: list[float] = totals.tolist()
    return found


def broadcast_tensors(values: Sequence[torch.Tensor], world: World, source: int = 0) -> None:
    """Overwrite tensors in place with those of rank `source`, fused into one message a dtype."""
    if world.world_size == 1 or not values:
        return
    for flat in fused(values):
        # As bytes: gloo and nccl know few of torch's dtypes.
        dist.broadcast(flat.view(torch.uint8), source)


def mean_buffers(values: Sequence[torch.Tensor], world: World) -> None:
    """Replace floating-point tensors by their mean over the ranks, in place."""
    all_reduce_sum(values, world)
    for value in values:
        value.div_(world.world_size)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Sum ``.grad`` over the ranks, for a step in which some rank has no sample and so no backward
    pass.

    A parameter without a gradient on any rank keeps ``None``, so that the optimizer leaves it alone
    as it would in a single process; one that has a gradient on some ranks counts as zero on the
    others. Sparse gradients stay sparse.
    """
    params = [p for p in parameters if p.requires_grad]
    if world.world_size == 1 or not params:
        return
    gradients = [p.grad for p in params]
    forms = [[g is not None, g is not None and g.is_sparse] for g in gradients]
    counts = torch.tensor(forms, dtype=torch.int32, device=world.device)
    dist.all_reduce(counts)
    dense = []
    for parameter, (used, sparse) in zip(params, counts.tolist(), strict=True):
        if not used:
            continue
        if 0 < sparse < used:  # some rank has a dense one, so that all must
            sparse = 0  # noqa: PLW2901
            parameter.grad = parameter.grad.to_dense() if parameter.grad is not None else None
        if parameter.grad is None:
            parameter.grad = _no_rows(parameter) if sparse else torch.zeros_like(parameter)
        if sparse:
            parameter.grad = _sum_sparse(parameter.grad, world)
        else:
            dense.append(parameter.grad)
    all_reduce_sum(dense, world)


def _sum_sparse(gradient: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of sparse gradients over the ranks; nccl has no such operation, so that there their
    rows are gathered."""
    if world.device.type != "cuda":
        dist.all_reduce(gradient)
        return gradient
    own = gradient.coalesce()
    indices = torch.cat(all_gather_rows(own.indices().T.contiguous(), world)).T
    values = torch.cat(all_gather_rows(own.values(), world))
    return torch.sparse_coo_tensor(indices, values, own.shape).coalesce()


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of 0, in the form that an embedding gives: whole rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape
    )


def broadcast_ints(
    values: Sequence[int] | None, world: World, source: int = 0, group: Any = None
) -> list[int]:
    """Rank `source`'s list of integers, on every rank of a group, all by default; the others pass
    ``None``."""
    if world.world_size == 1:
        return list(values or ())
    length = torch.tensor(
        [len(values) if values is not None else 0], dtype=torch.int64, device=world.device
    )
    dist.broadcast(length, source, group)
    if world.rank == source:
        data = torch.tensor(values, dtype=torch.int64, device=world.device)
    else:
        data = torch.empty(int(length), dtype=torch.int64, device=world.device)
    dist.broadcast(data, source, group)
    return data.tolist()


def broadcast_bytes(data: bytes, world: World, source: int, group: Any = None) -> bytes:
    """Rank `source`'s bytes, on every rank of a group, all by default; what the others pass is not
    used."""
    if world.world_size == 1:
        return data
    own = world.rank == source
    (length,) = broadcast_ints([len(data)] if own else None, world, source, group)
    if not length:
        return b""
    if own:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(world.device)
    else:
        sent = torch.empty(length, dtype=torch.uint8, device=world.device)
    dist.broadcast(sent, source, group)
    return data if own else sent.cpu().numpy().tobytes()


def broadcast_new(
    given: Sequence[torch.Tensor] | None,
    forms: Sequence[tuple[Sequence[int], torch.dtype]],
    world: World,
    source: int,
    group: Any = None,
) -> list[torch.Tensor]:
    """Rank `source`'s tensors on every rank, in few large messages. The others make them.

    Args:
        given: on rank `source`, the tensors, which stay as they are; None on the others.
        forms: shape and dtype of each, on all ranks.
        world: the ranks.
        source: the rank that has them.
        group: of the ranks that get them; None: all.

    Returns:
        On rank `source` `given`; else new tensors on the world's device, views of the messages.
    """
    found: list[Any] = list(given) if given is not None else [None] * len(forms)
    if world.world_size == 1:
        return found
    for numbers in _messages(forms):
        dtype = forms[numbers[0]][1]
        sizes = [math.prod(forms[number][0]) for number in numbers]
        if given is None:
            flat = torch.empty(sum(sizes), dtype=dtype, device=world.device)
        else:
            # Adam's steps are on the processor, and its averages on the GPU.
            flat = joined(given[number].to(world.device) for number in numbers)
        if len(flat):
            dist.broadcast(flat.view(torch.uint8), source, group)  # gloo and nccl know few dtypes
        if given is None:
            for number, part in zip(numbers, flat.split(sizes), strict=True):
                found[number] = part.view(list(forms[number][0]))
    return found


def _messages(forms: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[list[int]]:
    """The numbers of the forms that travel together: of one dtype, and up to so many bytes."""
    messages: list[list[int]] = []
    room: dict[torch.dtype, tuple[list[int], int]] = {}
    for number, (shape, dtype) in enumerate(forms):
        size = math.prod(shape) * dtype.itemsize
        if not size:
            messages.append([number])
            continue
        message, left = room.get(dtype, ([], 0))
        if size > left:
            message, left = [], max(_MESSAGE, size)
            messages.append(message)
        message.append(number)
        room[dtype] = message, left - size
    return messages


def all_gather_rows(rows: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Every rank's rows, in the order of the ranks; the first dimension may differ between ranks,
    the others may not."""
    if world.world_size == 1:
        return [rows]
    padded, lengths = _gather_padded(rows, world)
    return [part[:length] for part, length in zip(padded, lengths, strict=True)]


def _gather_padded(rows: torch.Tensor, world: World) -> tuple[torch.Tensor, list[int]]:
    """Every rank's rows, with zeros up to the most that one has, and how many each has."""
    counts = torch.empty(world.world_size, dtype=torch.int64, device=world.device)
    all_gather_single(counts, torch.tensor([len(rows)], dtype=torch.int64, device=world.device))
    lengths = counts.tolist()
    own = rows.new_zeros((max(lengths), *rows.shape[1:]), device=world.device)
    own[: len(rows)] = rows
    found = own.new_empty((world.world_size, *own.shape))
    all_gather_single(found.view(-1), own.view(-1))
    return found, lengths


def all_gather_ragged(values: Sequence[torch.Tensor], world: World) -> list[list[torch.Tensor]]:
    """Every rank's list of tensors, in the order of the ranks; they may be of any shapes, dtypes
    and number.

    Raises:
        TypeError: on all ranks: one of them has something else in its list.
    """
    if world.world_size == 1:
        return [list(values)]
    own = json.dumps(
        [
            [list(value.shape), str(value.dtype).removeprefix("torch.")]
            if isinstance(value, torch.Tensor)
            else None
            for value in values
        ]
    )
    forms = [json.loads(text) for text in all_gather_text(own, world)]
    if any(form is None for by_rank in forms for form in by_rank):
        raise TypeError("a list that is to be gathered holds what is no tensor")
    sent = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in values]
    empty = torch.empty(0, dtype=torch.uint8, device=world.device)
    gathered = []
    for message, by_rank in zip(
        all_gather_rows(torch.cat([empty, *sent]), world), forms, strict=True
    ):
        found, begin = [], 0
        for shape, name in by_rank:
            dtype = getattr(torch, name)
            size = math.prod(shape) * dtype.itemsize
            # A copy begins where memory is allocated, as an element of any dtype must.
            found.append(message[begin : begin + size].clone().view(dtype).view(shape))
            begin += size
        gathered.append(found)
    return gathered


def all_gather_text(text: str, world: World) -> list[str]:
    """Every rank's string, in the order of the ranks.

    Raises:
        WorldError: a rank sent something else, because it was in another call.
    """
    if world.world_size == 1:
        return [text]
    data = torch.frombuffer(bytearray(_TEXT + text.encode()), dtype=torch.uint8).to(world.device)
    padded, lengths = _gather_padded(data, world)
    parts = [
        row[:length].tobytes() for row, length in zip(padded.cpu().numpy(), lengths, strict=True)
    ]
    for rank, part in enumerate(parts):
        if not part.startswith(_TEXT):
            raise WorldError(
                f"rank {world.rank} exchanges text with the others, and rank {rank} sent something "
                "else: it is in another call. Every rank must make the same calls in the same "
                "order: call it on all ranks, without `if rank == 0`"
            )
    return [part.removeprefix(_TEXT).decode() for part in parts]
