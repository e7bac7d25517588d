"""What was asked of `SupervisedRunner.train`, checked before any worker is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allhands.checks import check_whole
from allhands.errors import UserError, kind_of
from allhands.loop.settings import LoopSettings, check_model
from allhands.loop.trainable import check_trainable
from allhands.runner.callbacks import Callback
from allhands.runner.evaluation import check_over_batch
from allhands.runner.hooks import check_callback
from allhands.runner.metrics import all_metrics


@dataclass(kw_only=True)
class TrainSettings(LoopSettings):
    """Everything that `SupervisedRunner.train` was called with, except who trains."""

    criterion: Any
    metrics: dict[str, Any]
    callbacks: list[Callback]
    num_epochs: int | None
    valid_loader: str | None = None
    main_metric: str = "loss"
    minimize_metric: bool = True
    verbose: bool = False
    check: bool = False
    overfit: bool = False
    load_best_on_end: bool = False
    log_every: int = 50

    def __post_init__(self) -> None:
        self.limit = 1 if self.overfit else 3 if self.check else None
        self.same_epoch = self.overfit
        if self.check and isinstance(self.evaluate_every, int):
            self.evaluate_every = min(self.evaluate_every, 3)

    def validate(self) -> None:
        """Raise `UserError` for the first setting that cannot be honoured."""
        self._check_criterion()
        check_whole("num_epochs", self.num_epochs, otherwise="None")
        check_whole("log_every", self.log_every)
        super().validate()
        self._check_main_metric()
        for callback in self.callbacks:
            if isinstance(callback, type) and issubclass(callback, Callback):
                raise UserError(
                    f"callbacks holds the class {callback.__name__}; write {callback.__name__}(…)"
                )
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks holds {kind_of(callback)}; each must be an allhands.Callback"
                )
            check_callback(callback)

    def _check_criterion(self) -> None:
        check_model(self.model)
        if not callable(self.criterion):
            raise UserError(
                f"criterion is {kind_of(self.criterion)}; pass a loss such as "
                "torch.nn.CrossEntropyLoss()"
            )

    def _check_main_metric(self) -> None:
        metrics = all_metrics(self.metrics)
        known = ["loss", *metrics]
        # torchmetrics may compute several values, whose names are only known when it has.
        may_be = any(
            isinstance(metric, nn.Module) and self.main_metric.startswith(f"{name}_")
            for name, metric in metrics.items()
        )
        if self.main_metric not in known and not may_be:
            raise UserError(
                f"main_metric={self.main_metric!r} is not measured; measured are: "
                f"{', '.join(known)}"
            )

    def check_trainable(self, workers: int) -> None:
        """Raise `UserError` for settings that cannot be honoured with this strategy and so many
        workers, before any is started."""
        check_trainable(self, workers)
        check_over_batch(self.criterion, self.strategy, workers)

    @property
    def trained(self) -> dict[str, Any]:
        """The objects of the user's that training changes, by the names that the user knows."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "criterion": self.criterion,
        }

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def criteria(self) -> list[nn.Module]:
        return [self.criterion] if isinstance(self.criterion, nn.Module) else []

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of `main_metric` beats the best so far (None: there is none yet); NaN
        never does."""
        return not math.isnan(value) and (
            best is None or (value < best if self.minimize_metric else value > best)
        )
