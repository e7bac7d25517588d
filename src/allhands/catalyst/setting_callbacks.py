"""Callbacks of Catalyst's that say how to train."""

from __future__ import annotations

from allhands.catalyst.translation import ArgumentCallback, only_default
from allhands.errors import UserError
from allhands.runner import EarlyStopping, KeepBest


def EarlyStoppingCallback(
    patience: int,
    loader_key: str | None = None,
    metric_key: str = "loss",
    minimize: bool = True,
    min_delta: float = 1e-6,
    metric: str | None = None,
) -> EarlyStopping:
    """`allhands.EarlyStopping`; `metric` is an older name of `metric_key`."""
    return EarlyStopping(patience, metric or metric_key, minimize, min_delta, loader_key)


class SchedulerCallback(ArgumentCallback):
    """When the scheduler steps.

    Args:
        loader_key, metric_key: whose metric a ReduceLROnPlateau looks at.
        mode: "batch" or "epoch"; None is what the scheduler's kind says.
        scheduler_key: its name, where there are several.
    """

    def __init__(
        self,
        loader_key: str | None = None,
        metric_key: str | None = None,
        mode: str | None = None,
        scheduler_key: str | None = None,
    ) -> None:
        periods = {None: None, "batch": "step", "epoch": "epoch"}
        if mode not in periods:
            raise UserError(f"SchedulerCallback(mode={mode!r}): it is 'batch', 'epoch' or None")
        super().__init__({"valid_loader": loader_key, "main_metric": metric_key})
        self.scheduler_key, self.period = scheduler_key, periods[mode]


class CheckpointCallback(ArgumentCallback):
    """Where checkpoints go, and what is best. The best ones and the newest are kept.

    Args:
        logdir: see `train`.
        loader_key, metric_key, minimize: what is best.
        topk: how many of the best are kept, see `allhands.KeepBest`; 0 is 1.
    """

    def __init__(
        self,
        logdir: str | None = None,
        loader_key: str | None = None,
        metric_key: str | None = None,
        minimize: bool | None = None,
        topk: int = 1,
    ) -> None:
        settings = {
            "logdir": logdir,
            "valid_loader": loader_key,
            "main_metric": metric_key,
            "minimize_metric": minimize,
        }
        super().__init__(settings, instead=[KeepBest(topk)] if topk > 1 else [])


class TqdmCallback(ArgumentCallback):
    """``train(verbose=True)``."""

    def __init__(self) -> None:
        super().__init__({"verbose": True})


class TimerCallback(ArgumentCallback):
    """Nothing: the table has the seconds of each epoch; ``train(profile=20)`` tells more."""

    def __init__(self) -> None:
        super().__init__()


class CheckRunCallback(ArgumentCallback):
    """``train(check=True)``: 3 epochs of 3 steps."""

    def __init__(self, num_batch_steps: int = 3, num_epoch_steps: int = 3) -> None:
        only_default("CheckRunCallback", num_batch_steps=(num_batch_steps, 3))
        only_default("CheckRunCallback", num_epoch_steps=(num_epoch_steps, 3))
        super().__init__({"check": True})


class BatchOverfitCallback(ArgumentCallback):
    """``train(overfit=True)``: the first step of each loader, in every epoch."""

    def __init__(self, **loaders: int) -> None:
        for name, number in loaders.items():
            only_default("BatchOverfitCallback", **{name: (number, 1)})
        super().__init__({"overfit": True})
