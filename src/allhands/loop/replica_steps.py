"""Steps of logical workers, of which a rank may train several: taken in turn, and taken again where
the rank that had taken them is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from allhands.data import Feed
from allhands.data.order import share_of
from allhands.data.replica_shares import ReplicaCounts, of_each
from allhands.errors import WorldError
from allhands.loop.task import Objective

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.step import OptimizerStep


class ReplicaSteps:
    """Takes the steps of the logical workers of one training."""

    def __init__(self, loop: BoundLoop) -> None:
        self._loop = loop
        # By loader and logical worker, while steps are taken again: where the feed stands.
        self._readings: dict[tuple[str, int], _Reading] = {}

    def take(
        self, take: OptimizerStep, objective: Objective, group: OptimizerGroup, batch: Any
    ) -> None:
        """Take one step of each logical worker of this rank, and exchange what is due."""
        replicas, loop = group.replicas, self._loop
        assert replicas is not None
        own = isinstance(batch[1], ReplicaCounts)
        if not own and len(replicas.held) != 1:
            raise WorldError(
                "a worker of local_sgd was lost, and the batch is one of your own, of which nobody "
                "else has its rows; give the loop loaders=…, or write --max-restarts"
            )
        parts = list(of_each(batch)) if own else [batch]
        place = loop.place_read if own else None
        again = _StepAgain(self, take, group, place, loop.step_setting(objective))
        replicas.take(take, parts, batch[2], again)
        replicas.end_step()
        assert take.before_update is not None
        take.before_update()
        replicas.commit()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, steps are taken again."""
        try:
            yield
        finally:
            for reading in self._readings.values():
                reading.feed.close()
            self._readings.clear()

    def share(self, name: str, epoch: int, skip: int, number: int) -> Any:
        """The share that a logical worker had of the step of a loader after `skip` samples of an
        epoch."""
        reading = self._readings.get((name, number))
        if reading is None:
            reading = _Reading(self._loop.feed_of_replica(name, number))
            self._readings[name, number] = reading
        step = reading.step(epoch, skip)
        count = self._loop.elastic.replicas  # type: ignore[union-attr]
        return self._loop.as_step(step, share_of(step[2], number, count or 1)[0])


class _Reading:
    """One logical worker's view of a loader, from step to step."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._at: tuple[int, int] | None = None
        self._steps: Iterator[Any] = iter(())

    def step(self, epoch: int, skip: int) -> Any:
        if self._at != (epoch, skip):
            self._steps = self.feed.epoch(epoch, skip)
        step = next(self._steps, None)
        if step is None:  # the place was the end of a pass over the data
            epoch, skip = epoch + 1, 0
            self._steps = self.feed.epoch(epoch, skip)
            step = next(self._steps)
        self._at = epoch, skip + step[2]
        return step


class _StepAgain:
    """Takes a step again for one logical worker, with the settings that it was taken with.

    Args:
        steps: of the training.
        take: takes it.
        group: its optimizer.
        place: the loader, the epoch and the samples before the step; None: the batch is not a
            loader's.
        setting: gives a context in which it computes what it did.
    """

    def __init__(
        self,
        steps: ReplicaSteps,
        take: OptimizerStep,
        group: OptimizerGroup,
        place: tuple[str, int, int] | None,
        setting: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._steps, self._take, self._group = steps, take, group
        self._place, self._setting = place, setting
        self._options = [_options(one) for one in group.optimizer.param_groups]
        self._modes = [module.training for module in group.model.modules()]

    def __call__(self, number: int) -> None:
        if self._place is None:
            raise WorldError(
                "a worker of local_sgd was lost, and its last batches were your own, of which "
                "nobody else has the rows; give the loop loaders=…, or write --max-restarts"
            )
        take, group = self._take, self._group
        modules = list(group.model.modules())
        modes = [module.training for module in modules]
        options = [_options(one) for one in group.optimizer.param_groups]
        # What is asked together of the first steps was asked when the step was taken.
        pairs, take.rule.pairs = take.rule.pairs, take.pairs
        observe, take.observe = take.observe, _unobserved  # it was measured then
        take.before_first_update = None
        self._set(modules, self._modes, self._options)
        try:
            with self._setting(), torch.enable_grad():
                take(*self._steps.share(*self._place, number))
        finally:
            take.rule.pairs, take.observe = pairs, observe
            self._set(modules, modes, options)

    def _set(self, modules: Any, modes: list[bool], options: list[dict[str, Any]]) -> None:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for group, values in zip(self._group.optimizer.param_groups, options, strict=True):
            group.update(values)


def _unobserved(*_: Any) -> None:
    """What is computed again is not measured again."""


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group, all but the parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
