"""Callbacks of Catalyst's that say how to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from allhands.catalyst.translation import ArgumentCallback, only_default
from allhands.errors import UserError
from allhands.runner import EarlyStopping


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


class CriterionCallback(ArgumentCallback):
    """The runner calls the criterion itself; the keys have to be the runner's."""

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        metric_key: str = "loss",
        criterion_key: str | None = None,
    ) -> None:
        only_default("CriterionCallback", metric_key=(metric_key, "loss"))
        only_default("CriterionCallback", criterion_key=(criterion_key, None))
        super().__init__(keys={"output_key": input_key, "target_key": target_key})


class BackwardCallback(ArgumentCallback):
    """The runner computes gradients itself; a bound of their norm is ``train(clip_norm=…)``.

    Args:
        metric_key: "loss".
        grad_clip_fn: ``torch.nn.utils.clip_grad_norm_``, or None.
        grad_clip_params: ``{"max_norm": 1.0}``, with `grad_clip_fn`.
    """

    def __init__(
        self,
        metric_key: str = "loss",
        grad_clip_fn: Any = None,
        grad_clip_params: Mapping[str, Any] | None = None,
    ) -> None:
        kind = type(self).__name__
        only_default(kind, metric_key=(metric_key, "loss"))
        settings: dict[str, Any] = {}
        if grad_clip_fn is not None:
            bound = dict(grad_clip_params or {})
            norm, extra = bound.pop("max_norm", None), {**bound, "norm_type": 2} != {"norm_type": 2}
            if grad_clip_fn is not nn.utils.clip_grad_norm_ or norm is None or extra:
                raise UserError(
                    f"{kind}: only the norm of all gradients can be bounded; write grad_clip_fn="
                    "torch.nn.utils.clip_grad_norm_ with grad_clip_params={'max_norm': 1.0}, or "
                    "train(clip_norm=1.0)"
                )
            settings["clip_norm"] = norm
        super().__init__(settings)


class OptimizerCallback(BackwardCallback):
    """The runner steps the optimizer itself; ``accumulation_steps`` is ``train(accumulate=…)``,
    whose gradient is the mean over the micro-batches and not their sum.

    Args:
        metric_key, grad_clip_fn, grad_clip_params: see `BackwardCallback`.
        accumulation_steps: micro-batches in one optimizer step.
        optimizer_key: None.
    """

    def __init__(
        self,
        metric_key: str = "loss",
        accumulation_steps: int = 1,
        grad_clip_fn: Any = None,
        grad_clip_params: Mapping[str, Any] | None = None,
        optimizer_key: str | None = None,
    ) -> None:
        super().__init__(metric_key, grad_clip_fn, grad_clip_params)
        only_default("OptimizerCallback", optimizer_key=(optimizer_key, None))
        if accumulation_steps != 1:
            self.settings["accumulate"] = accumulation_steps


class SchedulerCallback(ArgumentCallback):
    """When the scheduler steps.

    Args:
        loader_key, metric_key: whose metric a ReduceLROnPlateau looks at.
        mode: "batch" or "epoch"; None is what the scheduler's kind says.
        scheduler_key: None.
    """

    def __init__(
        self,
        loader_key: str | None = None,
        metric_key: str | None = None,
        mode: str | None = None,
        scheduler_key: str | None = None,
    ) -> None:
        only_default("SchedulerCallback", scheduler_key=(scheduler_key, None))
        periods = {None: None, "batch": "step", "epoch": "epoch"}
        if mode not in periods:
            raise UserError(f"SchedulerCallback(mode={mode!r}): it is 'batch', 'epoch' or None")
        settings = {
            "valid_loader": loader_key,
            "main_metric": metric_key,
            "scheduler_period": periods[mode],
        }
        super().__init__(settings)


class CheckpointCallback(ArgumentCallback):
    """Where checkpoints go, and what is best. The best and the newest are kept.

    Args:
        logdir: see `train`.
        loader_key, metric_key, minimize: what is best.
        topk: 1.
    """

    def __init__(
        self,
        logdir: str | None = None,
        loader_key: str | None = None,
        metric_key: str | None = None,
        minimize: bool | None = None,
        topk: int = 1,
    ) -> None:
        only_default("CheckpointCallback", topk=(topk, 1))
        settings = {
            "logdir": logdir,
            "valid_loader": loader_key,
            "main_metric": metric_key,
            "minimize_metric": minimize,
        }
        super().__init__(settings)


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
