"""An epoch of a loop, as its user sees it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from allhands.data import derive_seed, preserved_generators, rows_in, seed_everything
from allhands.data.replica_shares import ReplicaCounts
from allhands.errors import UserError, did_you_mean, kind_of
from allhands.loop.logged import Logged
from allhands.loop.step_function import Rows, StepFunction, loss_in, values_in

if TYPE_CHECKING:
    from allhands.data import Feed
    from allhands.loop.own_steps import OwnSteps


class Batch:
    """This rank's share of a global batch.

    What `Loop.step` takes. Where the share is one micro-batch, it also stands for that one:
    ``x, y = batch``, ``batch[0]`` and ``batch["image"]`` are its members, on the device. Where this
    rank has no sample in a step, it stands for one that counts for nothing.

    Attributes:
        parts: the micro-batches.
        count: samples of this rank.
        total: samples of all ranks.
    """

    def __init__(self, loop: OwnSteps, step: Any, first: int | None = None) -> None:
        self._loop = loop
        self.used: set[str] = set()
        #: Iterations before this one, and steps that were taken with it.
        self.iteration, self.steps = loop.global_step, 0
        self.renew(step, first)

    def renew(self, step: Any, first: int | None = None) -> None:
        """Stand for another share of the same global batch."""
        batches, counts, self.total, _ = step
        if isinstance(counts, ReplicaCounts):
            first = counts.first
        elif first is None:
            first, _ = self._loop.share(self.total)
        self.count = sum(counts)
        self.parts = []
        for batch, count in zip(batches, counts, strict=True):
            self.parts.append(Rows(batch, count, first, self.total))
            first += count
        self.counts = counts

    def as_step(self) -> tuple[list[Rows], Any, int, bool]:
        """As `BaseLoop.step` takes it."""
        return self.parts, self.counts, self.total, False

    @classmethod
    def of(cls, loop: OwnSteps, own: Any) -> Batch:
        """A batch that no loader of the loop has made: each rank has its own rows.

        Raises:
            UserError: it has no row, or another rank that should have the same rows has others.
        """
        count = rows_in(own)
        if not count:
            raise UserError(
                f"loop.step was given {kind_of(own)} without a row; give every rank tensors "
                "whose first dimension is the samples, at least one"
            )
        loop.misuse.agree_on_rows(own)
        first, total = loop.own_rows(count)
        return cls(loop, ([own], [count], total, False), first)

    @property
    def micro_batches(self) -> Iterator[Any]:
        """The micro-batches of this rank that hold samples, on its device."""
        for part in self.parts:
            if part.count:
                yield self._loop.to_device(part.batch)

    def _only(self) -> Any:
        if len(self.parts) != 1:
            raise UserError(
                f"this rank's share of the batch is {len(self.parts)} micro-batches; look at its "
                "members in the step function, which is called on each micro-batch"
            )
        return self._loop.to_device(self.parts[0].batch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._only())

    def __getitem__(self, key: Any) -> Any:
        return self._only()[key]

    def __len__(self) -> int:
        return self.count


class Evaluation(Mapping[str, float]):
    """This rank's share of a loader that is evaluated, and the means over all ranks.

    Iterate over it for the batches, and call `add` for each. After the ``with``, it is a mapping
    of names to means, the same on every rank.
    """

    def __init__(self, loop: OwnSteps, name: str, steps: Iterator[Any]) -> None:
        self._loop, self.name, self._steps = loop, name, steps
        self._means = Logged(loop.world, "add")
        self._values: dict[str, float] | None = None

    @property
    def batches(self) -> Iterator[Any]:
        """The micro-batches of this rank, on its device; each sample is in one of some rank's. One
        that is there for ranks that wait in their own call counts for nothing."""
        loop = self._loop
        try:
            for step in self._steps:
                for part in Batch(loop, step).parts:
                    loop.rows = part
                    yield loop.to_device(part.batch)
        finally:
            loop.rows = None

    @property
    def _count(self) -> int:
        """Samples of the current batch."""
        return 0 if self._loop.rows is None else self._loop.rows.count

    def add(self, **means: float | torch.Tensor) -> None:
        """Take in means over the samples of the current batch, by name."""
        if self._count:
            for name, value in means.items():
                self._means.add(name, value, self._count)

    def of(self, fn: Callable[[Any], Any]) -> None:
        """Take in what a step function gives for each batch."""
        where = StepFunction.name_of(fn)
        for batch in self.batches:
            result = fn(batch)
            self.take({"loss": loss_in(result, where), **values_in(result)})

    def take(self, values: Mapping[str, Any]) -> None:
        """Take in means over the samples of the current batch, or pairs ``(sum, count)``."""
        for name, value in values.items():
            if not isinstance(value, tuple):
                self.add(**{name: value})
            elif self._count and float(value[1]):
                self._means.add(name, value[0] / value[1], float(value[1]))

    def close(self) -> None:
        """Put the sums of all ranks together; all call it."""
        self._values = self._means.means(everywhere=False)

    def __getitem__(self, name: str) -> float:
        if self._values is None:
            raise UserError(
                f"the means of loader '{self.name}' are known after the `with epoch.evaluating(…)`"
            )
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values or {})

    def __len__(self) -> int:
        return len(self._values or {})


class Results(ABC):
    """What is printed and kept of an epoch or an iteration.

    Attributes:
        values: by loader, names to means.
    """

    values: dict[str, dict[str, float]]
    _loop: OwnSteps

    @abstractmethod
    def evaluating(self, name: str) -> AbstractContextManager[Evaluation]:
        """Within, models are in evaluation mode and gradients off; yields an `Evaluation`.

        Args:
            name: of a loader that is not trained on.
        """

    def evaluate(self, name: str, fn: Callable[[Any], Any]) -> dict[str, float]:
        """The means of a step function's loss and further values over a loader, over all ranks.

        Args:
            name: of a loader that is not trained on.
            fn: a step function, see `Loop.step`. Values beside the loss are means over the samples.
        """

        def evaluate() -> dict[str, float]:
            with self.evaluating(name) as evaluation:
                evaluation.of(fn)
            return dict(evaluation)

        self.values[name] = self._loop.unit(evaluate)
        return dict(self.values[name])

    def log(self, **values: float) -> None:
        """Add numbers, the same on every rank, to what is printed and kept."""
        own = self.values.setdefault("train", {})
        own |= {name: float(value) for name, value in values.items()}


class Iteration(Results):
    """One iteration of `Loop.steps`.

    Attributes:
        number: counted from 1.
        batch: this rank's share; None without loaders.
    """

    def __init__(self, loop: OwnSteps, number: int, batch: Batch | None) -> None:
        self._loop, self.number, self.batch = loop, number, batch
        self.values = {}

    def every(self, number: int) -> bool:
        """Whether this is one of every `number` iterations."""
        return self.number % number == 0

    @contextmanager
    def evaluating(self, name: str) -> Iterator[Evaluation]:
        """Within, models are in evaluation mode and gradients off; yields an `Evaluation`. What is
        drawn within does not change what training draws."""
        loop = self._loop
        feed = _feed(name, loop.evaluated_feeds, "evaluated")
        with preserved_generators(), loop.evaluation_state():
            seed_everything(derive_seed(loop.settings.seed, "evaluate", name, self.number))
            evaluation = Evaluation(loop, name, feed.epoch(0))
            yield evaluation
            evaluation.close()
        self.values[name] = dict(evaluation)

    def train(self) -> dict[str, float]:
        """The means of the steps since this was asked for the last time, over all ranks, which all
        call it."""
        return self._loop.means_so_far()

    def close(self) -> None:
        """The body of the iteration is through."""
        if self.values:
            self._loop.report_step(self.number, self.values)


class Epoch(Results):
    """One epoch.

    Attributes:
        number: counted from 1.
        metric: what a ReduceLROnPlateau looks at; to be set by you.
    """

    def __init__(self, loop: OwnSteps, number: int) -> None:
        self._loop, self.number = loop, number
        assert loop.position is not None
        self.values = dict(loop.position.done)
        self._was_evaluating = loop.position.evaluating
        self.metric = math.nan

    @property
    def train(self) -> Iterator[Batch]:
        """The batches of the loader that is trained on.

        Raises:
            UserError: there are several; write ``epoch.batches(name)``.
        """
        names = [feed.name for feed in self._loop.trained]
        if not names:
            raise UserError(
                "epoch.train: no loader's name begins with 'train'; write "
                "Loop(loaders={'train': loader}), or loop.steps(…) with batches of your own"
            )
        if len(names) > 1:
            raise UserError(
                f"epoch.train with the loaders {', '.join(names)}; write "
                f"epoch.batches('{names[0]}')"
            )
        return self.batches(names[0])

    def batches(self, name: str) -> Iterator[Batch]:
        """The batches of a loader that is trained on, which are left in this epoch."""
        loop, position = self._loop, self._loop.position
        feed = _feed(name, loop.trained, "trained on")
        assert position is not None
        if name in position.done or self._was_evaluating:
            return  # a resumed epoch is past it
        for step in loop.train(feed, loop.measures[name]):
            loop.batch = Batch(loop, step)
            yield loop.batch
            loop.end_iteration()
        self.values[name] = loop.measured(name)
        position.finish(name, self.values[name])

    @contextmanager
    def evaluating(self, name: str) -> Iterator[Evaluation]:
        """Within, models are in evaluation mode and gradients off; yields an `Evaluation`.

        Args:
            name: of a loader that is not trained on.
        """
        loop = self._loop
        feed = _feed(name, loop.evaluated_feeds, "evaluated")
        with loop.evaluation_state():
            evaluation = Evaluation(loop, name, loop.evaluation(feed))
            yield evaluation
            evaluation.close()
        self.values[name] = dict(evaluation)


def _feed(name: str, feeds: list[Feed], what: str) -> Feed:
    for feed in feeds:
        if feed.name == name:
            return feed
    known = [feed.name for feed in feeds]
    raise UserError(
        f"there is no loader '{name}' that is {what}{did_you_mean(name, known)} There are: "
        f"{', '.join(known) or 'none'}"
    )
