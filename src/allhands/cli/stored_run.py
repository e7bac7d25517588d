"""The run file that lies in a logdir."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from allhands.runner import Callback

NAME = "run.yml"


def store(folder: Path, text: str) -> None:
    """Write a run file into a logdir, whole or not at all."""
    aside = folder / f".run.{os.getpid()}.part"
    aside.write_text(text, encoding="utf-8")
    aside.replace(folder / NAME)


class StoreRunFile(Callback):
    """Writes the resolved run file into the logdir, once the files of an earlier run were moved
    aside."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_start(self, training: Any) -> None:
        folder = training.settings.logdir
        if folder is not None and training.world.rank == 0:
            store(folder, self.text)
