"""What was asked of a runner of one's own, checked before any worker is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.loop.model_groups import OwnModels, named
from allhands.loop.settings import LoopSettings
from allhands.runner.train_settings import TrainSettings


@dataclass(kw_only=True)
class OwnTrainSettings(TrainSettings):
    """Everything that `Runner.train` was called with, except who trains.

    Attributes:
        given_model: one model, or a dict.
    """

    own: OwnModels
    given_model: Any

    @classmethod
    def of(
        cls, runner: str, *, model: Any, optimizer: Any, scheduler: Any, metrics: Any, **given: Any
    ) -> OwnTrainSettings:
        """The settings of the runner that the user calls so.

        Raises:
            UserError: there is no model or optimizer, or metrics are given.
        """
        if model is None:
            raise UserError(f"no model: pass model=… here or to {runner}(model=…)")
        if metrics is not None:
            raise UserError(
                f"metrics=… with {runner}, whose steps know no output and target; return values "
                "from valid_step(self, loop, batch), and from step functions {'loss': loss, …}"
            )
        optimizers = _by_name("optimizer", optimizer)
        if isinstance(scheduler, Mapping):
            schedulers = dict(scheduler)
        elif scheduler is not None and len(optimizers) > 1:
            raise UserError(
                "scheduler is one, and there are the optimizers "
                f"{', '.join(optimizers)}; pass a dict by these names"
            )
        else:
            schedulers = dict.fromkeys(optimizers, scheduler)
        several = isinstance(model, Mapping) or isinstance(optimizer, Mapping)
        own = OwnModels(_by_name("model", model), optimizers, schedulers, several)
        first = next(iter(optimizers.values()))
        given["given_model"] = model
        return cls(own=own, model=own.model, optimizer=first, metrics={}, **given)

    def _check_criterion(self) -> None:
        """The steps know what it is."""

    def _check_main_metric(self) -> None:
        """What the steps return is known when they do."""

    def check_trainable(self, workers: int) -> None:
        self.own.check(self.of_loop(), workers, "distributed={!r}")

    def of_loop(self) -> LoopSettings:
        names = [field.name for field in fields(LoopSettings)]
        return LoopSettings(**{name: getattr(self, name) for name in names})

    @property
    def trained(self) -> dict[str, Any]:
        own = self.own
        return {
            "model": own.container,
            "optimizer": own.optimizers,
            "scheduler": own.schedulers,
            "criterion": self.criterion,
        }

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.own.optimizers.values())

    @property
    def criteria(self) -> list[nn.Module]:
        given = self.criterion.values() if isinstance(self.criterion, Mapping) else [self.criterion]
        return [one for one in given if isinstance(one, nn.Module)]


def _by_name(what: str, given: Any) -> dict[str, Any]:
    return named(what, None, given) if isinstance(given, Mapping) else named(what, given, None)
