"""PowerSGD: of each gradient matrix, two thin factors travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_reduce_sum
from allhands.data import derive_seed
from allhands.strategies.buckets import Bucket
from allhands.strategies.compressed import Residuals, wide
from allhands.world import World

# A column of which the ones before it leave less than this part points nowhere of its own.
_DEPENDENT = 1e-5


class PowerSGD(Residuals):
    """The exchange of one training by PowerSGD, with error feedback and warm start.

    After Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization, NeurIPS 2019 (algorithms 1 and 2). A rank's gradient M (n x m) with what was left
    over of its last one becomes P Q', of which P (n x r) is an orthonormal basis of the sum over
    the ranks of M times the last Q, and Q (m x r) the mean over the ranks of M' P. What P Q' does
    not hold of M is that rank's to keep. A tensor of more than two dimensions is a matrix with the
    first one as rows. Where the factors would be more than half of it, and for vectors, the
    gradient itself travels.

    Args:
        rank: r, or less for a matrix that is smaller.
        start: so many exchanges are in full before the first that is compressed.
        seed: of the first Q, the same on all ranks.
        named: the trained parameters.
        world: the ranks.
    """

    def __init__(
        self,
        rank: int,
        start: int,
        seed: int,
        named: Sequence[tuple[str, nn.Parameter]],
        world: World,
    ) -> None:
        super().__init__("powersgd", named, world)
        self.start, self.exchanges = start, 0
        #: Rows and columns of what is compressed, and the first Q.
        self._shapes: dict[str, tuple[int, int]] = {}
        self._first = self._like
        for name, parameter in named:
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            columns = parameter.numel() // max(rows, 1)
            r = min(rank, rows, columns)
            if 2 * r * (rows + columns) <= parameter.numel() and r:
                generator = torch.Generator().manual_seed(derive_seed(seed, "powersgd", name))
                drawn = torch.randn(columns, r, generator=generator, dtype=wide(parameter.dtype))
                self._shapes[name] = (rows, columns)
                self._first[name] = (drawn / drawn.norm(dim=0)).to(parameter.device)
        self._factors: dict[str, torch.Tensor] = {}

    def add_up(self, bucket: Bucket) -> None:
        """Add the gradients in a bucket up over the ranks, or what stands for them."""
        gradients = self.gradients(bucket)
        if self.exchanges < self.start:
            dist.all_reduce(bucket.gradients)
        else:
            bucket.gradients.mul_(self.world.world_size)  # the mean of these is the sum
            self._approximate(gradients)
        self.exchanges += bucket.is_last

    def _approximate(self, gradients: dict[str, torch.Tensor]) -> None:
        size = self.world.world_size
        whole = [gradient for name, gradient in gradients.items() if name not in self._shapes]
        matrices, bases, factors = {}, {}, {}
        for name, gradient in gradients.items():
            if name in self._shapes:
                matrix = gradient.view(self._shapes[name]).to(self._first[name].dtype, copy=True)
                if name in self._left:
                    matrix += self._left[name].view_as(matrix)
                matrices[name] = matrix
                bases[name] = matrix @ _unit_columns(self._factors.get(name), self._first[name])
        all_reduce_sum([*whole, *bases.values()], self.world)
        for gradient in whole:
            gradient.div_(size)
        for name, base in bases.items():
            bases[name] = _orthonormal(base)
            factors[name] = matrices[name].T @ bases[name]
        all_reduce_sum(list(factors.values()), self.world)
        for name, matrix in matrices.items():
            self._factors[name] = factors[name].div_(size)
            approximation = bases[name] @ self._factors[name].T
            gradients[name].copy_(approximation.view(-1))
            self._left[name] = matrix.sub_(approximation).view(-1)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"exchanges": self.exchanges, "factors": dict(self._factors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.exchanges = state["exchanges"]
        for name, factor in state["factors"].items():
            first = self._first.get(name)
            # Else the rank is another one now.
            if first is not None and first.shape == factor.shape:
                self._factors[name] = factor.to(first, copy=True)


def _unit_columns(factor: torch.Tensor | None, first: torch.Tensor) -> torch.Tensor:
    """The last Q with columns of length 1, or the first one's: a column of zeros would stay so for
    ever."""
    if factor is None:
        return first
    length = factor.norm(dim=0)
    # The comparison lets NaN through, which has to be seen.
    return torch.where(length <= 0, first, factor / length)


def _orthonormal(base: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns, by Gram and Schmidt; zeros for a column that depends on
    those before it."""
    done: list[torch.Tensor] = []
    for given in base.unbind(1):
        column = given
        for _ in range(2 if done else 0):  # once leaves rounding of the size of what was taken away
            before = torch.stack(done, 1)
            column = column - before @ (before.T @ column)
        length = column.norm()
        done.append(
            torch.where(
                length <= _DEPENDENT * given.norm(), torch.zeros_like(column), column / length
            )
        )
    return torch.stack(done, 1)
