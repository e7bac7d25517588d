"""Learning-rate schedulers: any object with ``step()``, called once an epoch or once an optimizer
step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from allhands.checks import check_bare
from allhands.errors import UserError

_EACH_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


class Schedule:
    """A scheduler and its period.

    Args:
        scheduler: any object with ``step()``, ``(scheduler, "step")``, ``(scheduler, "epoch")``, or
            None. Without a period, OneCycleLR and CyclicLR step at every optimizer step and all
            others at every epoch.

    Raises:
        UserError: no ``step()``, or an unknown period.
    """

    def __init__(self, scheduler: Any) -> None:
        period = None
        if isinstance(scheduler, tuple) and len(scheduler) == 2:
            scheduler, period = scheduler
            if period not in ("step", "epoch"):
                raise UserError(f"scheduler=(…, {period!r}): the period must be 'step' or 'epoch'")
        check_bare("scheduler", scheduler)
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise UserError(
                f"scheduler is a {type(scheduler).__name__} without a step() method; pass a "
                "torch.optim.lr_scheduler"
            )
        self.scheduler = scheduler
        self.given_period = period
        self.needs_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        self.period = period or ("step" if isinstance(scheduler, _EACH_STEP) else "epoch")
        if self.needs_metric and self.period == "step":
            raise UserError(
                "ReduceLROnPlateau looks at a metric, which is known once an epoch; use the period "
                "'epoch'"
            )

    @property
    def each_step(self) -> bool:
        """Whether `step` is due after every optimizer step."""
        return self.scheduler is not None and self.period == "step"

    def steps_at(self, period: str) -> bool:
        """Whether `step` is due at every `period`."""
        return self.scheduler is not None and self.period == period

    def follow_evaluations(self) -> None:
        """Evaluations are not at the ends of epochs: a scheduler that looks at a metric steps at
        each of them."""
        if self.needs_metric:
            self.period = "evaluation"

    def count_steps(self, name: str) -> None:
        """Step at every iteration, in a training without epochs; `name` is the optimizer's.

        Raises:
            UserError: it was given the period "epoch", or looks at a metric.
        """
        if self.given_period is None and not self.needs_metric:
            self.period = "step"
        elif self.steps_at("epoch"):
            raise UserError(
                f"loop.steps has no epochs, at which the scheduler of '{name}' would step; write "
                "(scheduler, 'step'), or step a ReduceLROnPlateau yourself"
            )

    def check_metric(self, metric: float) -> None:
        """Raise `UserError` where a metric is needed and none (NaN) is known."""
        if self.needs_metric and math.isnan(metric):
            raise UserError(
                "ReduceLROnPlateau looks at a number of each epoch; write epoch.metric = …, such "
                "as epoch.evaluate('valid', loss_of)['loss']"
            )

    def step(self, metric: float | None = None) -> None:
        """Advance once, whatever the number of workers."""
        with warnings.catch_warnings():
            # An optimizer that has been sent to a worker has lost the counter by which PyTorch
            # warns of a wrong order.
            warnings.filterwarnings("ignore", message=".*optimizer.step\\(\\).*")
            if self.needs_metric:
                self.scheduler.step(metric)
            else:
                self.scheduler.step()

    def describe(self) -> str:
        """For the line printed at the start, such as ``MultiStepLR once an epoch``."""
        if self.scheduler is None:
            return ""
        every = "optimizer step" if self.period == "step" else self.period
        return f"{type(self.scheduler).__name__} steps once {_article(every)} {every}"

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UserError` when the scheduler, or one inside it, changes another optimizer than
        `optimizer`."""
        groups = {id(group) for group in optimizer.param_groups}
        for scheduler in _parts(self.scheduler):
            other: Any = getattr(scheduler, "optimizer", None)
            # An optimizer around another one (Lookahead) shares its groups.
            if not hasattr(other, "param_groups") or groups & {
                id(group) for group in other.param_groups
            }:
                continue
            name, whole = type(scheduler).__name__, type(self.scheduler).__name__
            inside = "" if scheduler is self.scheduler else f", inside of {whole},"
            if self.given_period is None:
                new = f"{name}(optimizer, …)"
            else:
                new = f"({name}(optimizer, …), {self.given_period!r})"
            raise UserError(
                f"the scheduler {name}{inside} was made for another optimizer (a "
                f"{type(other).__name__}) than optimizer=…, whose "
                f"learning rate it would never change; make it from that one: scheduler={new}"
            )

    def check_length(
        self,
        steps: int | None,
        epochs: int | None,
        done_steps: int = 0,
        done_epochs: int = 0,
        epoch: str = "epoch",
    ) -> str:
        """Compare how long the schedule is with how long the training is.

        Args:
            steps: optimizer steps of the whole training; None where it is not known.
            epochs: epochs of the whole training; None where it is not known.
            done_steps, done_epochs: those that were taken before, by the run that is resumed.
            epoch: what an epoch is called.

        Returns:
            A line with both lengths where they differ, else "".

        Raises:
            UserError: the scheduler fails when it is asked for more than its own length, before the
                training ends.
        """
        by_step = self.period == "step" and epoch == "epoch"
        unit, total, done = (
            ("optimizer step", steps, done_steps) if by_step else (epoch, epochs, done_epochs)
        )
        length = _length(self.scheduler)
        if total is None or length is None:
            return ""
        # A scheduler that was used before begins where it stands.
        ends = int(getattr(self.scheduler, "last_epoch", done)) + total - done
        if ends == length.value or (ends > length.value and length.only_beyond):
            return ""
        name, written = type(self.scheduler).__name__, f"{length.name}={length.value:,}"
        both = (
            f"{name}({written}) steps once {_article(unit)} {unit}, and the training has "
            f"{total:,} {unit}s"
        )
        if ends != total:
            both += f", at whose end the scheduler has stepped {ends:,} times"
        if length.value == (epochs if by_step else steps) and epoch == "epoch":
            other, per = ("epoch", "an epoch") if by_step else ("step", "an optimizer step")
            both += f"; to step once {per}, write scheduler=(scheduler, {other!r})"
        if isinstance(self.scheduler, lr_scheduler.OneCycleLR) and ends > length.value:
            raise UserError(
                f"{both}: it fails after step {length.value:,}; write {length.name}={total:,}"
            )
        return f"note: {both}"

    def state_dict(self) -> Any:
        """The scheduler's state, or None when it keeps none."""
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state that `state_dict` gave."""
        if state is not None and hasattr(self.scheduler, "load_state_dict"):
            self.scheduler.load_state_dict(state)


class _Length(NamedTuple):
    """How many times a scheduler is meant to step: the argument that says so. `only_beyond`: more
    times are meant, too."""

    name: str
    value: int
    only_beyond: bool = False


_ARGUMENTS = {
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.LinearLR: "total_iters",
    lr_scheduler.ConstantLR: "total_iters",
    lr_scheduler.PolynomialLR: "total_iters",
}


def _length(scheduler: Any) -> _Length | None:
    """The length of a scheduler of torch.optim that has one; None for all others."""
    kind = type(scheduler)
    if kind in _ARGUMENTS:
        return _Length(_ARGUMENTS[kind], int(getattr(scheduler, _ARGUMENTS[kind])))
    if kind is lr_scheduler.MultiStepLR and scheduler.milestones:
        return _Length("last milestone", max(scheduler.milestones), only_beyond=True)
    if kind is lr_scheduler.StepLR:
        return _Length("step_size", scheduler.step_size, only_beyond=True)
    if kind is lr_scheduler.SequentialLR:
        begins = scheduler._milestones[-1]
        last = _length(scheduler._schedulers[-1])
        if last is None or last.only_beyond:
            return _Length("last milestone", begins, only_beyond=True)
        return _Length(f"{begins:,} + {last.name}", begins + last.value)
    if kind is lr_scheduler.ChainedScheduler:
        found = [length for length in map(_length, scheduler._schedulers) if length is not None]
        return max(found, key=lambda length: length.value, default=None)
    return None


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those inside it."""
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _parts(inner)


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def length_of_training(
    steps_of_epoch: int | None, epochs: int | None, max_steps: int | None
) -> tuple[int | None, int | None]:
    """The optimizer steps and the epochs of a whole training; None for what is not known before.

    Args:
        steps_of_epoch: of all loaders that are trained on; None where only reading tells.
        epochs, max_steps: what ends it, whichever comes first; None is no bound.
    """
    bounds = [max_steps]
    if steps_of_epoch is not None and epochs is not None:
        bounds.append(steps_of_epoch * epochs)
    steps = min((bound for bound in bounds if bound is not None), default=None)
    if steps_of_epoch and steps is not None:
        return steps, -(-steps // steps_of_epoch)
    return steps if epochs is None else None, epochs if max_steps is None else None


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
