"""What a step function asks of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_rows, all_reduce_sum
from allhands.data import derive_seed, to_device
from allhands.data.order import share_of
from allhands.errors import UserError
from allhands.loop.lifecycle import Lifecycle
from allhands.loop.step_function import Rows
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.epoch import Batch


class _Gather(torch.autograd.Function):
    """The rows of all ranks, with a gradient for this rank's own."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, world: World, share: int, holders: Sequence[int]
    ) -> torch.Tensor:
        of_ranks = all_gather_rows(tensor.detach().contiguous(), world)
        parts = [of_ranks[rank] for rank in holders]
        ctx.begin = sum(len(part) for part in parts[:share])
        ctx.rows = len(tensor)
        ctx.copies = world.world_size // len(holders)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # Each rank has weighted its loss by its share of the samples; the weights of the shares add
        # up to one, and so many ranks have the same share.
        slope = slopes[0].contiguous().clone()
        dist.all_reduce(slope)
        return slope[ctx.begin : ctx.begin + ctx.rows] / ctx.copies, None, None, None


def gather_rows(
    tensor: torch.Tensor, world: World, share: int, holders: Sequence[int]
) -> torch.Tensor:
    """The rows of all shares of the samples, in their order; shape ``[rows of all, …]``.

    Args:
        tensor: this rank's rows.
        world: the ranks.
        share: this rank's.
        holders: for each share a rank that has it.
    """
    if len(holders) == 1:
        return tensor
    gathered: torch.Tensor = _Gather.apply(tensor, world, share, holders)
    return gathered


class Communication(Lifecycle):
    """The part of `allhands.Loop` that talks to other ranks."""

    #: What the step function that runs was called on.
    rows: Rows | None = None
    #: This rank's share of the iteration's global batch; None without loaders.
    batch: Batch | None = None
    #: Whether a step function has called `gather`.
    has_gathered = False
    #: Whether this is in `Loop.accumulating`.
    is_accumulating = False
    # The iteration, and the step in it, for which random numbers are drawn.
    _drawing = (0, 0)
    _ranks: Sequence[int] | None = None
    counts: bool

    @property
    def rows_now(self) -> Rows | None:
        """What the step function was called on; outside of one, the batch of the iteration where it
        is one micro-batch."""
        if self.rows is None and self.batch is not None and len(self.batch.parts) == 1:
            return self.batch.parts[0]
        return self.rows

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, ``[rows of the global batch, …]``, in the order of the samples;
        differentiable. To be called in a step function, or before `backward`, on every rank.

        A loss of what it gives is a loss of the whole global batch: return it as it is.

        Raises:
            UserError: with ``accumulate`` above 1, or in `accumulating`; a tensor that has no row
                a sample.
        """
        if self.settings.accumulate > 1:
            raise UserError(
                f"loop.gather with accumulate={self.settings.accumulate} would give the rows of "
                "one micro-batch of each rank, and not of the global batch; write accumulate=1"
            )
        if self.is_accumulating and tensor.requires_grad:
            raise UserError(
                "loop.gather in loop.accumulating, where ranks may have other numbers of losses; "
                "call loop.backward(loss) without it, or loop.step(loss_of, batch)"
            )
        self.has_gathered = self.has_gathered or self.rows is not None
        rows = self.rows_now
        if rows is not None and not rows.count:
            tensor = tensor[:0]
        return gather_rows(tensor, self.world, self._share[0], self._holders())

    @cached_property
    def _share(self) -> tuple[int, int]:
        """Which share of the samples this rank has, and how many there are."""
        return self.settings.strategy.place(self.world)

    def _holders(self) -> Sequence[int]:
        """For each share of the samples a rank that has it; all ranks call it together."""
        if self._ranks is None:
            share, shares = self._share
            mine = torch.tensor([share], device=self.world.device)
            found = [int(one) for one in all_gather_rows(mine, self.world)]
            self._ranks = [found.index(number) for number in range(shares)]
        return self._ranks

    def own_rows(self, count: int) -> tuple[int, int]:
        """The position of this rank's first row in a global batch that the ranks have made, and its
        rows; all ranks call it together.

        Args:
            count: rows of this rank, which all ranks of one share have in common.
        """
        share, shares = self._share
        counts = torch.zeros(shares, dtype=torch.int64, device=self.world.device)
        if self.counts:
            counts[share] = count
        all_reduce_sum([counts], self.world)
        rows = counts.tolist()
        return sum(rows[:share]), sum(rows)

    def mean(self, value: float | torch.Tensor, count: float = 1) -> torch.Tensor:
        """The mean over all ranks of each rank's mean of `count` items; float64, without a
        gradient. To be called on every rank."""
        mine = (
            torch.as_tensor(value, dtype=torch.float64, device=self.world.device).detach() * count
        )
        items = torch.tensor(float(count), dtype=torch.float64, device=self.world.device)
        mine = mine.clone()
        all_reduce_sum([mine, items], self.world)
        return mine / items

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal numbers for the rows of the micro-batch, the same for a sample at any number of
        workers. To be called in a step function, or where the batch is one micro-batch.

        Args:
            shape: ``rows, …``; the rows of the micro-batch.
        """
        return self._draw(torch.randn, shape)

    def rand(self, *shape: int) -> torch.Tensor:
        """As `randn`, between 0 and 1."""
        return self._draw(torch.rand, shape)

    def _draw(self, draw: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        rows, place = self.rows_now, self._drawing
        if self.rows is None and self.batch is not None:
            place = self.batch.iteration, self.batch.steps
        if rows is None:
            raise UserError(
                "loop.randn and loop.rand draw for the samples of a batch, in a step function; "
                "elsewhere use torch.randn, which draws another stream on each rank"
            )
        if self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("loop.randn draws on the host; draw the noise into the batch")
        rows.draws += 1
        seed = derive_seed(self.settings.seed, "draw", *place, rows.draws)
        generator = torch.Generator().manual_seed(seed)
        whole = draw(rows.total, *shape[1:], generator=generator)
        first = rows.first if rows.count else 0
        return whole[first : first + shape[0]].to(self.world.device)

    def print(self, *values: Any) -> None:
        """Print on rank 0."""
        self.reporter.line(" ".join(map(str, values)))

    def share(self, total: int) -> tuple[int, int]:
        """The first of this rank's samples in a global batch of `total`, and the first that is
        behind them: ``slice(*loop.share(total))``."""
        return share_of(total, *self._share)

    def to_device(self, batch: Any) -> Any:
        """A batch with all its tensors on the loop's device."""
        return batch if self.world.device.type == "cpu" else to_device(batch, self.world.device)
