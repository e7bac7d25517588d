"""Catalyst's loggers: files in a folder of their own, beside those of ``train(logdir=…)``."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import allhands.runner
from allhands.catalyst.translation import only_default
from allhands.errors import UserError, kind_of
from allhands.loop.loggers import prepare_logdir


class ConsoleLogger:
    """The table that `train` prints in any case."""

    def __init__(self, log_hparams: bool = False) -> None:
        only_default("ConsoleLogger", log_hparams=(log_hparams, False))


class FolderLogger(allhands.runner.Callback, ABC):
    """Writes the history's rows, from the first process.

    Args:
        logdir: a folder of its own, or the one of `train`.
        use_logdir_postfix: the files go into a folder in it that is named after the kind of logger.
        log_batch_metrics, log_epoch_metrics: False and True; others are refused.
    """

    kind: str

    def __init__(
        self,
        logdir: Any,
        use_logdir_postfix: bool = False,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
    ) -> None:
        only_default(
            type(self).__name__,
            log_batch_metrics=(log_batch_metrics, False),
            log_epoch_metrics=(log_epoch_metrics, True),
        )
        folder = Path(logdir).expanduser()
        self.folder = str(folder / f"{self.kind}_logger" if use_logdir_postfix else folder)

    def on_train_start(self, training: Any) -> None:
        """Make the folder. Raises `UserError` where it cannot be written."""
        if training.world.is_main:
            prepare_logdir(self.folder)

    def on_row_end(self, training: Any) -> None:
        """Write the history's last row."""
        if training.world.is_main:
            self._write(training.history)

    @abstractmethod
    def _write(self, history: Mapping[str, Any]) -> None:
        """Write what the history's last row adds."""


class CSVLogger(FolderLogger):
    """``NAME.csv`` for each loader, a row an epoch."""

    kind = "csv"

    def _write(self, history: Mapping[str, Any]) -> None:
        for loader, columns in _loaders(history).items():
            with (Path(self.folder) / f"{loader}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["epoch", *columns])
                rows = zip(*columns.values(), strict=True)
                writer.writerows([number, *row] for number, row in enumerate(rows, start=1))


class TensorboardLogger(FolderLogger):
    """Files of TensorBoard's, with ``NAME/METRIC`` for each loader and epoch."""

    kind = "tensorboard"

    def _write(self, history: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(self.folder) as writer:
            for loader, columns in _loaders(history).items():
                for name, values in columns.items():
                    writer.add_scalar(f"{loader}/{name}", values[-1], len(values))


def _loaders(history: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """The history's columns, by loader."""
    return {name: dict(part) for name, part in history.items() if isinstance(part, Mapping)}


def logger_callbacks(loggers: Any) -> list[Any]:
    """The callbacks that Catalyst's ``loggers`` are: of a dict or a list."""
    members = list(loggers.values() if isinstance(loggers, Mapping) else loggers)
    for one in members:
        if not isinstance(one, ConsoleLogger | FolderLogger):
            raise UserError(
                f"train(loggers=…): {kind_of(one)} is no logger here; write dl.CSVLogger(logdir), "
                "dl.TensorboardLogger(logdir), or a Callback with on_row_end(self, training), "
                "which logs training.history"
            )
    return [one for one in members if isinstance(one, FolderLogger)]
