"""Learning-rate schedulers: any object with ``step()``, called once an epoch or once an optimizer step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import lr_scheduler

from allhands.errors import UserError

_EACH_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


class Schedule:
    """A scheduler and its period.

    Args:
        scheduler: any object with ``step()``, ``(scheduler, "step")``, ``(scheduler, "epoch")``, or None. Without a period,
            OneCycleLR and CyclicLR step at every optimizer step and all others at every epoch.

    Raises:
        UserError: no ``step()``, or an unknown period.
    """

    def __init__(self, scheduler: Any) -> None:
        period = None
        if isinstance(scheduler, tuple) and len(scheduler) == 2:
            scheduler, period = scheduler
            if period not in ("step", "epoch"):
                raise UserError(f"scheduler=(…, {period!r}): the period must be 'step' or 'epoch'")
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise UserError(f"scheduler is a {type(scheduler).__name__} without a step() method; pass a torch.optim.lr_scheduler")
        self.scheduler = scheduler
        self.needs_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        self.period = period or ("step" if isinstance(scheduler, _EACH_STEP) else "epoch")
        if self.needs_metric and self.period == "step":
            raise UserError("ReduceLROnPlateau looks at a metric, which is known once an epoch; use the period 'epoch'")

    @property
    def each_step(self) -> bool:
        """Whether `step` is due after every optimizer step."""
        return self.scheduler is not None and self.period == "step"

    @property
    def each_epoch(self) -> bool:
        """Whether `step` is due after every epoch."""
        return self.scheduler is not None and self.period == "epoch"

    def step(self, metric: float | None = None) -> None:
        """Advance once, whatever the number of workers."""
        with warnings.catch_warnings():
            # An optimizer that has been sent to a worker has lost the counter by which PyTorch warns of a wrong order.
            warnings.filterwarnings("ignore", message=".*optimizer.step\\(\\).*")
            if self.needs_metric:
                self.scheduler.step(metric)
            else:
                self.scheduler.step()

    def describe(self) -> str:
        """For the line printed at the start, such as ``MultiStepLR once an epoch``."""
        if self.scheduler is None:
            return ""
        every = "optimizer step" if self.period == "step" else "epoch"
        return f"{type(self.scheduler).__name__} steps once {'an' if every[0] in 'aeiou' else 'a'} {every}"

    def state_dict(self) -> Any:
        """The scheduler's state, or None when it keeps none."""
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state that `state_dict` gave."""
        if state is not None and hasattr(self.scheduler, "load_state_dict"):
            self.scheduler.load_state_dict(state)


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]
