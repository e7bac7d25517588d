"""What a pipeline does with the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.data import share_of
from allhands.errors import UserError
from allhands.step.exchange import Forward, LossOf
from allhands.strategies.pipeline_run import Autocast, MicroBatch, PipelineRun
from allhands.strategies.pipeline_stage import rows_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PipelinePasses:
    """Cuts each batch into micro-batches and sends them through the stages.

    Args:
        run: this rank's stages.
        micro_batches: how many each batch is cut into.
        mesh: with the axes dp_shard and dp_replicate.
        names: of parameters that the whole model knows by another name first.
        shared: the names of parameters that several stages hold, and those stages.
        batch_norm: the model has BatchNorm.

    Attributes:
        chunks: this rank's stages, to be sharded before `model` is called.
    """

    def __init__(
        self,
        run: PipelineRun,
        micro_batches: int,
        mesh: DeviceMesh,
        names: Mapping[str, str],
        shared: Mapping[str, list[int]],
        batch_norm: bool,
    ) -> None:
        self.chunks: list[nn.Module] = run.chunks
        self.shared = shared
        self._run, self._micro_batches, self._names = run, micro_batches, names
        self._batch_norm = batch_norm
        # fully_shard's collectives must match over these, micro-batch by micro-batch.
        self._groups = (
            [mesh.get_group(axis) for axis in ("dp_shard", "dp_replicate") if mesh[axis].size() > 1]
            if mesh["dp_shard"].size() > 1
            else []
        )
        self._sizes: list[int] = []

    def model(self) -> nn.Module:
        """What the runner sees of the model."""
        return self._run.model(self._names)

    def divide(
        self, batches: Sequence[Any], counts: Sequence[int]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """The micro-batches that `forward_backward` is to be given, and the samples in each, out of
        this rank's in a step."""
        sizes = self._largest(counts) if self._groups else counts
        self._sizes, divided, real = [], [], []
        for batch, count, size in zip(batches, counts, sizes, strict=True):
            pieces = min(self._micro_batches, size)
            for piece in range(pieces):
                start, stop = share_of(size, piece, pieces)
                own = max(0, min(count, stop) - start)
                # One that has no sample of its own is given one that does not count.
                rows = slice(start, start + own) if own else slice(0, 1)
                divided.append(rows_of(batch, rows, max(count, 1)))
                real.append(own)
                self._sizes.append(stop - start)
        return divided, real

    def _largest(self, counts: Sequence[int]) -> list[int]:
        """The largest of all ranks' batches, one by one."""
        both = torch.tensor(
            [[count, -count] for count in counts], dtype=torch.int64, device=self._run.device
        )
        for group in self._groups:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        largest, smallest = both[:, 0].tolist(), (-both[:, 1]).tolist()
        if self._batch_norm and largest != smallest:
            raise UserError(
                "the workers have different numbers of samples in this step, and a pipeline with "
                "shards fills them up, which BatchNorm's statistics would see. Write "
                "drop_last=True for this loader, or use GroupNorm"
            )
        return largest

    def forward_backward(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        forward: Forward,
        loss_of: LossOf,
        autocast: Autocast,
    ) -> None:
        """Add the gradients of the micro-batches up in the parameters.

        Args:
            batches, counts: what `divide` gave.
            forward: calls the runner's handle_batch with the staged model, for the output and the
                target.
            loss_of: ``(number of the micro-batch, output, target)`` to the weighted loss that is
                differentiated; called for each with a count, on the rank that has the output.
            autocast: the context of forward passes and losses.
        """
        micro_batches = []
        for batch, count, size in zip(batches, counts, self._sizes, strict=True):
            held = max(count, 1)
            if held == size:
                filled = batch
            else:
                filled = rows_of(batch, torch.arange(size).clamp(max=held - 1), held)
            micro_batches.append(MicroBatch(batch, filled, count))
        self._run.forward_backward(micro_batches, forward, loss_of, autocast)
