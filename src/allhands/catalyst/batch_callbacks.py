"""Callbacks of Catalyst's that compute with a batch, by the keys of ``runner.batch``.

A `SupervisedRunner` with one criterion does the same itself, and takes them as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allhands.catalyst.batch_runner import BatchCallback
from allhands.catalyst.callback import CallbackOrder
from allhands.catalyst.translation import ArgumentCallback, only_default
from allhands.errors import UserError, kind_of, nearest
from allhands.runner.evaluation import fitting
from allhands.step import LossRule


class BatchPart(ArgumentCallback, BatchCallback):
    """A callback that is an argument of `train`, or computes with each batch."""

    def needs_batches(self) -> bool:
        """Whether it asks for what one criterion and one optimizer do not do."""
        return False

    def begin(self, runner: Any) -> None:
        """A training begins."""

    def looked_up(self, runner: Any, key: str | None) -> Any:
        """A member of the runner's batch."""
        kind, batch = type(self).__name__, runner.batch
        if not isinstance(key, str):
            raise UserError(f"{kind} needs to know what it looks at; write input_key, target_key")
        if not isinstance(batch, Mapping):
            raise UserError(
                f"{kind} looks up {key!r}, and the batch is {kind_of(batch)}; let handle_batch set "
                f"self.batch = {{{key!r}: …}}"
            )
        if key not in batch:
            raise UserError(
                f"{kind} looks up {key!r}, and self.batch has {', '.join(map(str, batch))}; write "
                "one of these, or let handle_batch set it"
            )
        return batch[key]

    def pair(self, runner: Any) -> tuple[Any, Any]:
        """The output and the target."""
        output_key = self.keys.get("output_key", getattr(runner, "output_key", None))
        target_key = self.keys.get("target_key", getattr(runner, "target_key", None))
        return self.looked_up(runner, output_key), self.looked_up(runner, target_key)


def metric_of(callback: Any, runner: Any, key: str) -> torch.Tensor:
    """A member of ``batch_metrics``."""
    if key in runner.batch_metrics:
        return runner.batch_metrics[key]
    kind, known = type(callback).__name__, ", ".join(runner.batch_metrics) or "nothing"
    near = nearest(key, list(runner.batch_metrics))
    meant = f"; did you mean {near!r}?" if near else "; add a CriterionCallback that computes it"
    raise UserError(f"{kind} looks at {key!r}, and batch_metrics has {known}{meant}")


class MetricCallback(BatchPart):
    """Measures an output and a target."""

    order = CallbackOrder.Metric

    def on_batch_end(self, runner: Any) -> None:
        if runner.batch_size:
            runner.measure(self, *self.pair(runner))


class CriterionCallback(BatchPart):
    """A criterion of an output and a target: sets ``batch_metrics[metric_key]``.

    Args:
        input_key, target_key: of the batch; None are the runner's.
        metric_key: under which the loss is found.
        criterion_key: its name, where there are several.
    """

    order = CallbackOrder.Metric

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        metric_key: str = "loss",
        criterion_key: str | None = None,
    ) -> None:
        super().__init__(keys={"output_key": input_key, "target_key": target_key})
        for key in (input_key, target_key):
            if key is not None and not isinstance(key, str):
                raise UserError(f"CriterionCallback({key!r}): write one key of the batch")
        self.metric_key, self.criterion_key = metric_key, criterion_key

    def needs_batches(self) -> bool:
        return self.metric_key != "loss" or self.criterion_key is not None

    def begin(self, runner: Any) -> None:
        chosen = chosen_from(runner.criterion, self.criterion_key, "criterion", self)
        if not callable(chosen):
            raise UserError("CriterionCallback needs train(criterion=…)")
        self._criterion, self._rule = chosen, LossRule(chosen)
        self._fitted = fitting(lambda _, pair: pair, chosen)
        if isinstance(chosen, nn.Module):
            chosen.to(runner.engine.device)

    def on_batch_end(self, runner: Any) -> None:
        output, target = self._fitted(None, self.pair(runner))  # type: ignore[arg-type]
        self._rule.check_shapes(output, target)
        if runner.batch_size and runner.divides_batches:
            self._check_mean(output, target)
        runner.batch_metrics[self.metric_key] = self._criterion(output, target)

    def _check_mean(self, output: Any, target: Any) -> None:
        """Raise `UserError` for a criterion that is no mean over the samples of a batch; of one
        that does not say so, the first values are looked at."""
        rule, counted = self._rule, None
        if rule.check is not None:
            rule.check.look(output, target)
            if rule.check.found:
                raise UserError(rule.check.found)
            if rule.check.found is not None:
                rule.check = None
        if rule.counts_targets and not target.is_floating_point():
            (counted,) = rule.count_targets([target]).tolist()  # type: ignore[union-attr]
        if rule.sums or (counted is not None and counted != target.numel()):
            raise UserError(
                "CriterionCallback on several workers, or with accumulate, needs a criterion that "
                f"is a mean over the samples, and {type(self._criterion).__name__} sums, weighs or "
                "leaves out some; use one model, criterion and optimizer without batch hooks, of "
                "which it is exact, or class Own(allhands.Runner), whose steps return (sum, count)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_fitted"}


class BackwardCallback(BatchPart):
    """The backward pass of ``batch_metrics[metric_key]``; a bound of the gradients' norm is
    ``train(clip_norm=…)``.

    Args:
        metric_key: of the loss.
        grad_clip_fn: ``torch.nn.utils.clip_grad_norm_``, or None.
        grad_clip_params: ``{"max_norm": 1.0}``, with `grad_clip_fn`.
    """

    order = CallbackOrder.Backward

    def __init__(
        self,
        metric_key: str = "loss",
        grad_clip_fn: Any = None,
        grad_clip_params: Mapping[str, Any] | None = None,
    ) -> None:
        kind = type(self).__name__
        self.metric_key = metric_key
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

    def needs_batches(self) -> bool:
        return self.metric_key != "loss"

    def on_batch_end(self, runner: Any) -> None:
        if runner.is_train_loader:
            runner.engine.backward(metric_of(self, runner, self.metric_key))


class OptimizerCallback(BackwardCallback):
    """The step of an optimizer, with the gradients that all backward passes have left in its
    parameters; where no `BackwardCallback` has its metric, its backward pass too.

    ``accumulation_steps`` is ``train(accumulate=…)``, whose gradient is the mean over the
    micro-batches and not their sum.

    Args:
        metric_key, grad_clip_fn, grad_clip_params: see `BackwardCallback`.
        accumulation_steps: micro-batches in one optimizer step.
        optimizer_key: its name, where there are several.
    """

    order = CallbackOrder.Optimizer

    def __init__(
        self,
        metric_key: str = "loss",
        accumulation_steps: int = 1,
        grad_clip_fn: Any = None,
        grad_clip_params: Mapping[str, Any] | None = None,
        optimizer_key: str | None = None,
    ) -> None:
        super().__init__(metric_key, grad_clip_fn, grad_clip_params)
        self.optimizer_key, self._passes = optimizer_key, True
        if accumulation_steps != 1:
            self.settings["accumulate"] = accumulation_steps

    def needs_batches(self) -> bool:
        return super().needs_batches() or self.optimizer_key is not None

    def begin(self, runner: Any) -> None:
        self._passes = not any(
            type(other) is BackwardCallback and other.metric_key == self.metric_key
            for other in runner.callbacks
        )
        if isinstance(runner.optimizer, Mapping) and self.settings:
            given = " and ".join(self.settings)
            raise UserError(
                f"OptimizerCallback says {given} for one of several optimizers; write "
                "train(clip_norm=…), which is for each of them, and no accumulation"
            )
        chosen_from(runner.optimizer, self.optimizer_key, "optimizer", self)

    def on_batch_end(self, runner: Any) -> None:
        if not runner.is_train_loader:
            return
        if self._passes:
            super().on_batch_end(runner)
        optimizer = chosen_from(runner.optimizer, self.optimizer_key, "optimizer", self)
        optimizer.step()
        optimizer.zero_grad()


class BatchTransformCallback(BatchPart):
    """A function of members of ``runner.batch``, whose result becomes members of it.

    Args:
        transform: the function.
        scope: "on_batch_start" or "on_batch_end".
        input_key: what it is given, in order: a name, or a list.
        output_key: what it gives; None is `input_key`.
    """

    order = CallbackOrder.Internal

    def __init__(
        self,
        transform: Callable[..., Any],
        scope: str,
        input_key: str | Sequence[str],
        output_key: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not callable(transform) or scope not in ("on_batch_start", "on_batch_end"):
            raise UserError(
                f"BatchTransformCallback(transform={kind_of(transform)}, scope={scope!r}): write a "
                "function, and scope='on_batch_start' or 'on_batch_end'"
            )
        self.transform, self.scope, self.inputs = transform, scope, _names(input_key)
        self.outputs = self.inputs if output_key is None else _names(output_key)

    def needs_batches(self) -> bool:
        return True

    def on_batch_start(self, runner: Any) -> None:
        if self.scope == "on_batch_start":
            self._apply(runner)

    def on_batch_end(self, runner: Any) -> None:
        if self.scope == "on_batch_end":
            self._apply(runner)

    def _apply(self, runner: Any) -> None:
        given = self.transform(*(self.looked_up(runner, name) for name in self.inputs))
        results = (given,) if len(self.outputs) == 1 else tuple(given)
        if len(results) != len(self.outputs):
            raise UserError(
                f"BatchTransformCallback: {len(results)} results for {', '.join(self.outputs)}"
            )
        runner.batch = {**runner.batch, **dict(zip(self.outputs, results, strict=True))}


def _names(keys: str | Sequence[str]) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


class MetricAggregationCallback(BatchPart):
    """One number of several in ``batch_metrics``.

    Args:
        metric_key: under which it is found.
        metrics: names, or for a weighted mode a dict of their weights; None is all.
        mode: "mean", "sum", "weighted_mean" or "weighted_sum".
        scope: "batch".
    """

    order = CallbackOrder.MetricAggregation

    def __init__(
        self,
        metric_key: str,
        metrics: Sequence[str] | Mapping[str, float] | None = None,
        mode: str = "mean",
        scope: str = "batch",
    ) -> None:
        super().__init__()
        only_default("MetricAggregationCallback", scope=(scope, "batch"))
        modes = ("mean", "sum", "weighted_mean", "weighted_sum")
        weighted = isinstance(mode, str) and mode.startswith("weighted_")
        if mode not in modes or weighted != isinstance(metrics, Mapping):
            raise UserError(
                f"MetricAggregationCallback(metrics={kind_of(metrics)}, mode={mode!r}): write "
                "mode='mean' or 'sum' with a list of names, or mode='weighted_mean' or "
                "'weighted_sum' with a dict of weights"
            )
        self.metric_key, self.names, self.mode = metric_key, metrics, mode

    def needs_batches(self) -> bool:
        return True

    def on_batch_end(self, runner: Any) -> None:
        names = list(runner.batch_metrics) if self.names is None else list(self.names)
        weights = self.names if isinstance(self.names, Mapping) else dict.fromkeys(names, 1.0)
        total = sum(metric_of(self, runner, name) * weights[name] for name in names)
        mean = self.mode.endswith("mean")
        runner.batch_metrics[self.metric_key] = total / sum(weights.values()) if mean else total


def chosen_from(given: Any, key: str | None, what: str, callback: Any) -> Any:
    """One of several by its key, or the only one."""
    several = isinstance(given, Mapping)
    if several and key in given:
        return given[key]
    if not several and key is None:
        return given
    there = ", ".join(map(repr, given)) if several else f"one {what}, which has no name"
    raise UserError(f"{type(callback).__name__}({what}_key={key!r}): there is {there}")


def completed(callbacks: list[Any], loss_key: str) -> list[Any]:
    """Callbacks of a supervised runner, with the criterion, the backward pass and the step where
    none of them is there."""
    wanted: dict[type, Callable[[], Any]] = {
        CriterionCallback: lambda: CriterionCallback(metric_key=loss_key),
        OptimizerCallback: lambda: OptimizerCallback(metric_key=loss_key),
    }
    for kind, make in wanted.items():
        if not any(isinstance(callback, kind) for callback in callbacks):
            callbacks = [*callbacks, make()]
    return callbacks
