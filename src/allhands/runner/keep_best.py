"""Keeps more checkpoints than the best one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.checks import check_whole
from allhands.errors import UserError
from allhands.loop.checkpoint import folder as folders
from allhands.runner.callbacks import Callback

if TYPE_CHECKING:
    from allhands.runner.training import Training


class KeepBest(Callback):
    """Keep the checkpoints of the best epochs: ``best`` is the best one, ``best-2`` the next.

    What is best is told by `valid_loader`, `main_metric` and `minimize_metric` of `train`.

    Args:
        count: how many; a number above 0.

    Raises:
        UserError: `count` is none; there is no logdir.
    """

    def __init__(self, count: int) -> None:
        check_whole("KeepBest(count=…)", count)
        self.count = count
        # Those of the last row, of which the newest may still be on its way to the disk.
        self._names: list[str] = []

    def on_train_start(self, training: Training) -> None:
        self._names = []
        if training.settings.logdir is None:
            raise UserError("KeepBest has no checkpoints to keep; pass logdir=… to train()")

    def on_row_end(self, training: Training) -> None:
        folder = training.loop.checkpoints.folder
        if folder is None or training.world.rank != 0:
            return
        links = [folder / f"best-{place}" for place in range(2, self.count + 1)]
        kept = _targets([folder / "best", *links]) | set(self._names)
        names = self._names = self._best(training, kept)
        folder.mkdir(parents=True, exist_ok=True)
        for link, name in zip(links, names[1:], strict=False):
            folders.point(link, name)
        for link in links[max(0, len(names) - 1) :]:
            link.unlink(missing_ok=True)

    def _best(self, training: Training, kept: set[str]) -> list[str]:
        history, settings = training.history, training.settings
        values = history[training.valid_loader].get(settings.main_metric, [])
        sign = 1.0 if settings.minimize_metric else -1.0
        epochs, steps = history["epoch"], history["step"]
        within = training.loop.position is not None
        own = folders.name_of(epochs[-1], steps[-1] if within else None)
        rows = []
        for row, value in enumerate(values):
            known = {folders.name_of(epochs[row], step) for step in (None, steps[row])} & kept
            name = own if row == len(values) - 1 else min(known, default=None)
            if name is not None and not math.isnan(value):
                rows.append((sign * value, row, name))
        return [name for _, _, name in sorted(rows)[: self.count]]


def _targets(links: list[Path]) -> set[str]:
    return {os.readlink(link) for link in links if link.is_symlink()}
