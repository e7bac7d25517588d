"""Means of what callbacks log during an epoch, over all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import torch

from allhands.comm import all_gather_text, calls, sums_of_ranks
from allhands.errors import UserError
from allhands.world import World

#: Sums and weights by name.
Sums = tuple[dict[str, float | torch.Tensor], dict[str, float]]


class Logged:
    """Sums and weights by name, of one epoch of one loader."""

    def __init__(self, world: World, call: str = "loop.log") -> None:
        self.world, self.call = world, call
        self.start()

    def start(self) -> None:
        """Begin an epoch."""
        self._sums: dict[str, float | torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def copy(self) -> Sums:
        return dict(self._sums), dict(self._weights)

    def add(self, name: str, value: float | torch.Tensor, count: float) -> None:
        """Take in the mean of `count` items."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise UserError(
                    f"{self.call}({name!r}, …) got shape {list(value.shape)}; it takes one number"
                )
            if value.device.type == "cpu":
                value = value.item()
            else:
                value = value.detach().reshape(()).double()
        self._sums[name] = self._sums.get(name, 0.0) + value * count
        self._weights[name] = self._weights.get(name, 0.0) + count

    def means(self, taken: Collection[str] = (), everywhere: bool = True) -> dict[str, float]:
        """The mean of each name over all ranks, the same on every rank.

        Args:
            taken: names that are not free.
            everywhere: every rank must have logged each name; False: a rank may have had nothing to
                log.

        Raises:
            UserError: a name is among `taken`, or some rank has not logged it.
        """
        calls.note("means of what was logged")
        names = sorted(self._sums)
        by_rank = [set(json.loads(text)) for text in all_gather_text(json.dumps(names), self.world)]
        for name in sorted(set().union(*by_rank)):
            has = [rank for rank, logged in enumerate(by_rank) if name in logged]
            if len(has) < len(by_rank) and everywhere:
                ranks = f"rank{'s' if len(has) > 1 else ''} {', '.join(map(str, has))}"
                raise UserError(
                    f"{self.call}({name!r}, …) was called on {ranks} only, of {len(by_rank)} "
                    "ranks; call it on every rank, without `if rank == 0`"
                )
            if name in taken:
                raise UserError(
                    f"{self.call}({name!r}, …): '{name}' is a metric of this loader already; "
                    "choose another name"
                )
        names = sorted(set().union(*by_rank))
        if not names:
            return {}
        for name in names:
            self._sums.setdefault(name, 0.0)
            self._weights.setdefault(name, 0.0)
        numbers = [*(self._sums[name] for name in names), *(self._weights[name] for name in names)]
        totals = sums_of_ranks(numbers, self.world)
        sums, weights = totals[: len(names)], totals[len(names) :]
        return {
            name: total / weight if weight else float("nan")
            for name, total, weight in zip(names, sums, weights, strict=True)
        }

    def partial(self) -> dict[str, torch.Tensor]:
        """This rank's sums and weights, for a checkpoint."""
        return {
            name: torch.tensor([float(total), self._weights[name]], dtype=torch.float64)
            for name, total in self._sums.items()
        }

    def take_up(self, parts: Sequence[Mapping[str, torch.Tensor]], names: Collection[str]) -> None:
        """Continue from what `partial` gave on one rank, or on several; `names` are known on every
        rank."""
        for name in names:
            self._sums.setdefault(name, 0.0)
            self._weights.setdefault(name, 0.0)
        for part in parts:
            for name, pair in part.items():
                total, weight = pair.tolist()
                self._sums[name] = self._sums.get(name, 0.0) + total
                self._weights[name] = self._weights.get(name, 0.0) + weight
