"""The mean loss of one loader over an epoch: sums and counts, reduced once, every sample exactly
once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allhands.comm import all_gather_rows, broadcast_tensors, calls, sums_of_ranks
from allhands.errors import UserError
from allhands.step import NonFiniteLossError
from allhands.world import World


class LossMean:
    """The loss of one loader, over one epoch.

    On a CPU every loss is read at once, and a training loss that is not finite raises before it
    reaches the weights. On other devices the sums stay on the device; `check_finite` reads them.

    Args:
        world: the processes.
        trains: whether the loader is trained on.
        counts: False where another rank sees the same samples, and its sums are those that count.
    """

    def __init__(self, world: World, trains: bool, counts: bool = True) -> None:
        self.world = world
        self.counts = counts
        self.trains = trains
        self.where = ""
        self.samples = 0
        self._sums: dict[str, Any] = {}
        self._on_cpu = world.device.type == "cpu"
        self.start("")

    def start(self, where: str) -> None:
        """Begin an epoch; `where` names it in errors."""
        self.where = where
        self.samples = 0
        self.batches, self.without_loss = 0, False
        #: Which step of an evaluation the micro-batches that follow are of.
        self.step = 0
        self._loss = (
            0.0 if self._on_cpu else torch.zeros((), dtype=torch.float64, device=self.world.device)
        )
        self._count: Any = 0.0
        self._shared = float("nan")
        self._sums = dict.fromkeys(self._sums, 0.0)

    def observe(
        self, output: Any, target: Any, loss: torch.Tensor | None, factor: float, count: Any
    ) -> None:
        """Take in one micro-batch: ``loss * factor`` is its sum of losses over `count` items. None:
        the criterion has none for it, and the loader is told without a loss."""
        self.batches += 1
        if loss is None:
            self.without_loss = True
            return
        if self._on_cpu:
            value = loss.item()
            if self.trains and not math.isfinite(value):
                self._raise_non_finite(value, self.world.rank)
            self._loss += value * factor
        else:
            self._loss += loss.detach() * factor
        self._count += count

    def running_loss(self) -> float:
        """The mean loss on this rank so far, or what `share_loss` has told where it has none. Reads
        the device."""
        count = float(self._count)
        return float(self._loss) / count if count else self._shared

    def sums(self) -> tuple[float, float]:
        """The sum of this rank's losses so far, and what it counts; 0 where another rank counts the
        same samples. Reads the device."""
        return (float(self._loss), float(self._count)) if self.counts else (0.0, 0.0)

    def share_loss(self) -> None:
        """Tell the ranks that have no losses of their own the mean over the others; all ranks call
        it together."""
        mine = (self._loss, self._count) if self.counts else (0.0, 0.0)
        loss, count = sums_of_ranks(mine, self.world)
        self._shared = loss / count if count else float("nan")

    def check_finite(self) -> None:
        """Raise `NonFiniteLossError` on all ranks when a training loss of any rank since `start`
        was not finite.

        Reads the device, and asks the other ranks where losses are not looked at one by one
        (`observe`).
        """
        if not self.trains:
            return
        value = float(self._loss)
        if self._on_cpu or self.world.world_size == 1:
            ranks = [] if math.isfinite(value) else [self.world.rank]
        else:
            calls.note("looking at the loss")
            mine = torch.tensor(
                [not math.isfinite(value)], dtype=torch.int32, device=self.world.device
            )
            ranks = [rank for rank, bad in enumerate(all_gather_rows(mine, self.world)) if int(bad)]
        if ranks:
            self._raise_non_finite(value if self.world.rank in ranks else float("nan"), ranks[0])

    def _raise_non_finite(self, value: float, rank: int) -> None:
        on_rank = f" on rank {rank}" if self.world.world_size > 1 else ""
        raise NonFiniteLossError(
            f"the training loss is {value}{on_rank} ({self.where}, batch {self.batches}). The "
            "weights of the last checkpoint are untouched. Usual causes: a learning rate too high, "
            "a target or input that is not finite, a logarithm or division by zero; clip_norm=1.0 "
            "bounds the step"
        )

    def partial(self) -> dict[str, torch.Tensor]:
        """What this rank has measured since `start`, for a checkpoint."""
        numbers = [self.batches, self.samples, self._loss, self._count, *self._sums.values()]
        if not self.counts:
            numbers = [0.0] * len(numbers)
        return {
            "numbers": torch.stack(
                [torch.as_tensor(n, dtype=torch.float64).reshape(()).cpu() for n in numbers]
            )
        }

    def take_up(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Continue from what `partial` gave on one rank, or on several whose sums this rank takes
        over.

        Raises:
            UserError: what was measured cannot be put together.
        """
        for part in parts:
            batches, samples, loss, count, *sums = part["numbers"].to(self.world.device)
            self.batches += int(batches)
            self.samples += int(samples)
            self._loss += loss.item() if self._on_cpu else loss
            self._count += count.item() if self._on_cpu else count
            for name, value in zip(self._sums, sums, strict=True):
                self._sums[name] = self._sums[name] + value

    def result(self) -> dict[str, float]:
        """The loss over all samples of all ranks, the same number on every rank."""
        calls.note(("metrics of", self.where))
        sums = [self._loss, self._count, self.samples, self.batches > 0, self.without_loss]
        sums += self._sums.values()
        if not self.counts:
            sums = [0.0] * len(sums)
        totals = sums_of_ranks(sums, self.world)
        loss, count, samples, ranks, without_loss, *further = totals
        if not ranks:
            purpose = "train on" if self.trains else "evaluate"
            raise UserError(
                f"there was no batch to {purpose} ({self.where}): the loader has drop_last=True "
                "and fewer samples than a global batch (batch_size x workers x accumulate), or an "
                "empty stream. Write drop_last=False, or a smaller batch_size"
            )
        values = {} if without_loss else {"loss": loss / count if count else float("nan")}
        values |= {
            name: total / samples if samples else float("nan")
            for name, total in zip(self._sums, further, strict=True)
        }
        values |= self._computed(ranks < self.world.world_size)
        numbers = torch.tensor(list(values.values()), dtype=torch.float64, device=self.world.device)
        # Decisions hang on these: they must be equal to the last bit.
        broadcast_tensors([numbers], self.world)
        return dict(zip(values, numbers.tolist(), strict=True))

    def _computed(self, some_empty: bool) -> dict[str, float]:
        """Further values, which are no sums; `some_empty`: some rank had no sample."""
        return {}
