"""The run file that lies in a logdir."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write_text
from allhands.runner import Callback

NAME = "run.yml"


def store(folder: Path, text: str) -> None:
    """Write a run file into a logdir, whole or not at all."""
    atomic_write_text(folder / NAME, text)


class StoreRunFile(Callback):
    """Writes the resolved run file into the logdir, once the files of an earlier run were moved
    aside."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_start(self, training: Any) -> None:
        folder = training.settings.logdir
        if folder is not None and training.world.rank == 0:
            store(folder, self.text)
