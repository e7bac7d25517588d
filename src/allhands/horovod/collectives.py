"""What an agreed operation does to the tensors of one rank, over a torch group. The same on CPU and
GPU."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.horovod.reduce_ops import ActiveAverage, Adasum, Average, Max, Min, Product, Sum

Tensors = list[torch.Tensor]
_TORCH_OPS: dict[str, Any] = {
    Average: dist.ReduceOp.SUM,
    ActiveAverage: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
# gloo and nccl cannot reduce these; in the wider type the result is the same.
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32}
_KEPT_BUFFERS = 16


class Buffers:
    """Memory for fused tensors on the CPU, used again: fresh pages for 25 MB cost as much as adding
    them up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[torch.dtype, int], torch.Tensor] = OrderedDict()

    def flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """All of them, one after another."""
        parts = [tensor.reshape(-1) for tensor in tensors]
        if parts[0].device.type != "cpu":
            return torch.cat(parts)
        key = (parts[0].dtype, sum(part.numel() for part in parts))
        buffer = self._kept.get(key)
        if buffer is None:
            buffer = self._kept[key] = torch.empty(key[1], dtype=key[0])
            if len(self._kept) > _KEPT_BUFFERS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return torch.cat(parts, out=buffer)


def allreduce(
    tensors: Tensors,
    outputs: Tensors,
    op: str,
    pre: float,
    post: float,
    members: int,
    active: int,
    group: Any,
    buffers: Buffers,
) -> None:
    """Reduce each tensor over the group's ranks into its output, which may be the tensor itself.

    Args:
        tensors, outputs: of equal shapes and dtypes.
        op: a `ReduceOp`.
        pre, post: what values are multiplied by before and after it.
        members, active: the number of ranks, and of those that have not joined.
        group: a torch group, or None for a rank alone.
        buffers: where fused tensors lie.
    """
    if op == Adasum:
        return _adasum(tensors, outputs, pre, post, members, group)
    divisor = {Average: members, ActiveAverage: active}.get(op, 1)  # type: ignore[call-overload]
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(place)
    for places in by_dtype.values():
        own = [tensors[place] for place in places]
        into = [outputs[place] for place in places]
        if len(own) == 1 and into[0].is_contiguous():
            if into[0].data_ptr() != own[0].data_ptr():
                into[0].copy_(own[0])
            result = _reduced(into[0], op, pre, post, divisor, group)
            if result is not into[0]:
                into[0].copy_(result)
            continue
        flat = _reduced(buffers.flat(own), op, pre, post, divisor, group)
        pieces = [
            piece.view(tensor.shape)
            for piece, tensor in zip(flat.split([t.numel() for t in own]), own, strict=True)
        ]
        torch._foreach_copy_(into, pieces)
    return None


def _reduced(
    flat: torch.Tensor, op: str, pre: float, post: float, divisor: int, group: Any
) -> torch.Tensor:
    """In place where the dtype allows it."""
    flat = _scaled(flat, pre)
    if group is not None:
        wider = _WIDER.get(flat.dtype)
        work = flat.to(wider) if wider is not None else flat
        dist.all_reduce(work, op=_TORCH_OPS[op], group=group)
        flat = work.ne(0) if flat.dtype is torch.bool else work.to(flat.dtype)
    if divisor > 1 and flat.dtype is not torch.bool:
        if flat.is_floating_point() or flat.is_complex():
            flat.div_(divisor)
        else:
            flat = torch.div(flat, divisor, rounding_mode="trunc")
    return _scaled(flat, post)


def _scaled(flat: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return flat
    if flat.is_floating_point() or flat.is_complex():
        return flat.mul_(factor)
    return flat.double().mul_(factor).to(flat.dtype)


def _adasum(
    tensors: Tensors, outputs: Tensors, pre: float, post: float, members: int, group: Any
) -> None:
    """Pairs of ranks, then pairs of pairs: a and b become (1 - ab/2aa) a + (1 - ab/2bb) b, for each
    tensor by itself."""
    if members & (members - 1):
        raise ValueError(
            f"op Adasum needs a power of two of ranks, and there are {members}; set op to "
            "hvd.Average"
        )
    rank = dist.get_rank(group) if group is not None else 0
    flat = torch.cat(
        [tensor.reshape(-1).float() if _half(tensor) else tensor.reshape(-1) for tensor in tensors]
    )
    lengths = [tensor.numel() for tensor in tensors]
    flat = _scaled(flat, pre)
    distance = 1
    while distance < members:
        other = torch.empty_like(flat)
        partner = dist.get_global_rank(group, rank ^ distance)
        calls = [
            dist.P2POp(dist.isend, flat, partner, group),
            dist.P2POp(dist.irecv, other, partner, group),
        ]
        for work in dist.batch_isend_irecv(calls if rank & distance else calls[::-1]):
            work.wait()
        first, second = (other, flat) if rank & distance else (flat, other)
        pairs = zip(first.split(lengths), second.split(lengths), strict=True)
        flat = torch.cat([_pair(a, b) for a, b in pairs])
        distance *= 2
    flat = _scaled(flat, post)
    for output, piece in zip(outputs, flat.split(lengths), strict=True):
        output.copy_(piece.view(output.shape))


def _half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide_a, wide_b = a.double(), b.double()
    dot, aa, bb = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    of_a = torch.where(aa > 0, 1 - dot / (2 * aa), torch.ones_like(aa))
    of_b = torch.where(bb > 0, 1 - dot / (2 * bb), torch.ones_like(bb))
    return (wide_a * of_a + wide_b * of_b).to(a.dtype)


def allgather(tensors: Tensors, rows: Sequence[Sequence[int]], group: Any) -> Tensors:
    """Each tensor's rows of all ranks, in the order of the ranks; `rows` are their numbers, for
    each tensor and rank."""
    gathered = []
    for tensor, lengths in zip(tensors, rows, strict=True):
        if group is None:
            gathered.append(tensor.clone())
            continue
        data = _as_bytes(tensor)
        width = _row_bytes(tensor)
        longest = max(lengths) * width
        if data.numel() < longest:
            data = torch.cat([data, data.new_zeros(longest - data.numel())])
        parts = [torch.empty_like(data) for _ in lengths]
        if longest:
            dist.all_gather(parts, data, group=group)
        whole = torch.cat(
            [part[: length * width] for part, length in zip(parts, lengths, strict=True)]
        )
        gathered.append(_from_bytes(whole, tensor, sum(lengths)))
    return gathered


def broadcast(tensors: Tensors, outputs: Tensors, root: int, group: Any) -> None:
    """Rank `root`'s tensors (counted in the whole world) into the outputs of all ranks."""
    is_root = group is None or dist.get_rank() == root
    for tensor, output in zip(tensors, outputs, strict=True):
        if is_root and output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
    if group is None:
        return
    data = torch.cat([_as_bytes(output) for output in outputs])
    dist.broadcast(data, root, group=group)
    if is_root:
        return
    offset = 0
    for output in outputs:
        length = output.numel() * output.element_size()
        output.copy_(data[offset : offset + length].clone().view(output.dtype).view(output.shape))
        offset += length


def alltoall(
    tensor: torch.Tensor, splits: Sequence[Sequence[int]], place: int, group: Any
) -> torch.Tensor:
    """The rows that each rank has for this one. `splits`: for each rank, how many it has for each;
    `place`: which we are."""
    if group is None:
        return tensor.clone()
    width = _row_bytes(tensor)
    received = [own[place] for own in splits]
    data = _as_bytes(tensor)
    into = data.new_empty(sum(received) * width)
    dist.all_to_all_single(
        into, data, [n * width for n in received], [n * width for n in splits[place]], group=group
    )
    return _from_bytes(into, tensor, sum(received))


def rows_of(length: int, members: int, place: int) -> tuple[int, int]:
    """First and number of rows of one rank in a reducescatter: the first ranks get one more where
    they do not divide."""
    each, more = divmod(length, members)
    return place * each + min(place, more), each + (place < more)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # one that numpy has made may have a stride of 0
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    width = tensor.element_size()
    for length in tensor.shape[1:]:
        width *= length
    return width


def _from_bytes(data: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    return data.view(like.dtype).view(rows, *like.shape[1:])
