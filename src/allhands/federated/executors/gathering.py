"""Clients that were trained one after another, handed over several at once."""

from __future__ import annotations

import time

import torch

from allhands.federated.algorithms.base import Trained
from allhands.federated.executors.base import Sink, wait_for

#: Clients that are handed over at once, by kind of device. What is done with clients that have
#: trained waits for the device, and a GPU that is waited for after every small client is idle for a
#: part of the time.
AT_ONCE = {"cuda": 16}
_BYTES = 2**28  # at most, of their rows


class Gathered:
    """A `Sink` that keeps clients until there are so many that their rows are worth an exchange
    with `sink`.

    Args:
        row: a client's row, shape ``[1, length]``.
        rows: where they are kept, from an earlier round; None at first.
    """

    def __init__(self, row: torch.Tensor, rows: torch.Tensor | None) -> None:
        most = AT_ONCE.get(row.device.type, 1)
        most = int(min(most, max(1, _BYTES // (row.shape[1] * row.element_size()))))
        self.rows = rows if rows is not None or most == 1 else row.new_zeros(most, row.shape[1])
        self._kept: list[Trained] = []
        self._began = time.perf_counter()

    def take(self, trained: Trained, seconds: float, sink: Sink) -> None:
        """Keep one client, and hand all over when there is no room for another."""
        if self.rows is None:
            sink(trained, seconds)
            return
        self.rows[len(self._kept)].copy_(trained.rows[0])
        self._kept.append(trained)
        if len(self._kept) == len(self.rows):
            self.give(sink)

    def give(self, sink: Sink) -> None:
        """Hand over those that are kept."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        assert self.rows is not None
        own = {name: torch.cat([one.own[name] for one in kept]) for name in kept[0].own}
        whole = Trained(
            [one.clients[0] for one in kept],
            [one.slots[0] for one in kept],
            self.rows[: len(kept)],
            kept[0].start if kept[0].start.dim() == 1 else torch.cat([one.start for one in kept]),
            torch.cat([one.samples for one in kept]),
            torch.cat([one.steps for one in kept]),
            torch.cat([one.loss for one in kept]),
            _join([one.start_loss for one in kept]),
            own,
            _join([one.integers for one in kept]),
        )
        wait_for(self.rows.device)
        sink(whole, (time.perf_counter() - self._began) / len(kept))
        self._began = time.perf_counter()


def _join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
