"""Gradients that travel in fewer bits: rounded ones without a residual, and codecs whose residual
each rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_single
from allhands.comm.codecs import cast_dtype, codec_from, way_back
from allhands.comm.coded_sum import exchange, part_length
from allhands.comm.compress import checked_compress
from allhands.errors import UserError, warn_renamed
from allhands.strategies.buckets import Bucket
from allhands.world import World


def sum_rounded(
    flat: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """Add a flat buffer of floating-point numbers up over the ranks, in place; numbers travel in
    fp16 or bf16.

    Each rank gets its part of the buffer from all others in `dtype`, adds it up in fp32 (float64
    stays so), and sends the sum to all in `dtype`: 2 (N - 1) / N times 2 bytes a number, half of
    what a ring sends in fp32. So a number is rounded twice, however many ranks there are, and the
    result is the same bits on all of them. (An all-reduce of bf16 would round at every addition.)
    What is beyond the range of fp16 becomes infinite, which the next loss tells.

    All operations are in order with the current stream and none looks at a value, so that a CUDA
    graph can capture them.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    length = part_length(flat.numel(), size)
    message = nn.functional.pad(flat.to(dtype), (0, size * length - flat.numel()))
    received = torch.empty_like(message)
    # As bytes: not every backend knows bf16.
    dist.all_to_all_single(received.view(torch.uint8), message.view(torch.uint8), group=group)
    own = (
        received.view(size, length)
        .sum(0, dtype=torch.promote_types(flat.dtype, torch.float32))
        .to(dtype)
    )
    all_gather_single(received.view(torch.uint8), own.view(torch.uint8), group=group)
    flat.copy_(received[: flat.numel()])


class Residuals:
    """What compression has left over of each gradient on this rank, which is added to the next
    step's.

    It is in units of a rank's own mean: the sum over the ranks of what they have left, divided by
    their number, is what the gradient lacks.

    Args:
        name: of the codec, for messages.
        named: the trained parameters.
        world: the ranks.
    """

    def __init__(self, name: str, named: Sequence[tuple[str, nn.Parameter]], world: World) -> None:
        self.name, self.world = name, world
        self._names = {id(parameter): name for name, parameter in named}
        self._left: dict[str, torch.Tensor] = {}
        #: By parameter, a tensor of the type and on the device of what is left over.
        self._like: dict[str, torch.Tensor] = {}

    def gradients(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The gradients in a bucket by name, flat; views of it.

        Raises:
            UserError: this rank has not made a gradient: what is left over of it would be sent in a
                step that does not use it.
        """
        if bucket.missing:
            names = [self._names[id(parameter)] for parameter in bucket.missing]
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise UserError(
                f"DDP(compress={self.name!r}): on rank {self.world.rank} these parameters took no "
                f"part in the loss: {shown}. "
                "Remove them from the model, set requires_grad=False, or leave compress out"
            )
        names = [self._names[id(parameter)] for parameter in bucket.parameters]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        return dict(zip(names, bucket.gradients.split(sizes), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What all ranks hold alike."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """What is left over on this rank, by parameter; and 1, which adds up to the number of
        ranks."""
        return {f"left/{name}": left for name, left in self._left.items()} | {
            "ranks": torch.ones((), dtype=torch.float64)
        }

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on with what `own_tensors` gave, or with the sum of it over another number of
        ranks."""
        before = float(tensors.get("ranks", 1))
        for name, like in self._like.items():
            if f"left/{name}" in tensors:
                left = tensors[f"left/{name}"].to(like, copy=True)
                # A rank's part of a mean was 1 / before, and is 1 / N now.
                self._left[name] = left * (self.world.world_size / before) if before > 1 else left


class CodedSum(Residuals):
    """The exchange of one training in a codec, with the residual.

    Gradients travel to the rank that adds up their part of a bucket, and the sum comes back, both
    encoded. What the sum has lost is in the residual of the rank that has added it up.
    """

    def __init__(
        self, compress: Mapping[str, Any], named: Sequence[tuple[str, nn.Parameter]], world: World
    ) -> None:
        super().__init__(compress["name"], named, world)
        self._codec, self._back = codec_from(compress), codec_from(way_back(compress))
        self._like = {
            name: parameter.new_empty(0, dtype=wide(parameter.dtype)) for name, parameter in named
        }

    def add_up(self, bucket: Bucket) -> None:
        """Add the gradients in a bucket up over the ranks, or what stands for them."""
        gradients = self.gradients(bucket)
        size, rank = self.world.world_size, self.world.rank
        # The mean of these is the sum.
        own = bucket.gradients.to(wide(bucket.gradients.dtype)).mul(size)
        if self._left:
            own += torch.cat(
                [
                    self._left[name]
                    if name in self._left
                    else one.new_zeros(len(one), dtype=own.dtype)
                    for name, one in gradients.items()
                ]
            )
        total, left, lost, _ = exchange(own, 1.0, self._codec, self._back, mean=True)
        begin = rank * part_length(len(left), size)
        left[begin : begin + len(lost)].add_(lost, alpha=size)
        bucket.gradients.copy_(total)
        self._left.update(
            zip(gradients, left.split([len(one) for one in gradients.values()]), strict=True)
        )


def check_compress(
    compress: Any, powersgd_rank: Any, powersgd_start: Any, find_unused_parameters: bool
) -> dict[str, Any] | None:
    """The codec of ``DDP(compress=…)`` with all its options."""
    for name, value in (("rank", powersgd_rank), ("start", powersgd_start)):
        if value is None:
            continue
        new = {
            "name": "powersgd",
            **(compress if isinstance(compress, Mapping) else {}),
            name: value,
        }
        if (compress["name"] if isinstance(compress, Mapping) else compress) != "powersgd":
            raise UserError(
                f"DDP(compress={compress!r}, powersgd_{name}={value!r}): leave powersgd_{name} "
                f"out, or write compress={new}"
            )
        warn_renamed(f"DDP(powersgd_{name}=…)", f"compress={new}")
        compress = new
    checked = checked_compress(compress, "DDP(compress=")
    if checked is not None and cast_dtype(checked) is None and find_unused_parameters:
        raise UserError(
            f"DDP(compress={compress!r}, find_unused_parameters=True): what compression has left "
            "over of a gradient is added to the next step's, in which the parameter may be unused; "
            "leave find_unused_parameters out, or set compress to 'bf16'"
        )
    return checked


def check_compressible(compress: Mapping[str, Any], model: nn.Module, precision: str) -> None:
    """Raise `UserError` for a model or a training whose gradients cannot travel so."""
    here = f"DDP(compress={compress['name']!r})"
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"{here}: '{name}' has sparse gradients, which travel as they are; make it with "
                "sparse=False, or leave compress out"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"{here}: '{name}' is {dtype}, which is not compressed; leave compress out"
            )
    if cast_dtype(compress) is None and precision == "fp16":
        raise UserError(
            f"{here} with precision='fp16': a gradient that overflows would stay in what "
            "compression keeps for the next step; write precision='bf16', or set compress to 'bf16'"
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)
