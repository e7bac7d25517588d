"""Steps of the user's own in a run of a comparison: what they do is recorded, and what the run
varies is changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_rows
from allhands.data import Source, map_tensors, preserved_generators, rows_in, seed_everything
from allhands.errors import UserError
from allhands.loop.epoch import Batch
from allhands.loop.loop import Loop
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.own_steps import OwnSteps
from allhands.loop.settings import Data
from allhands.loop.step_function import Rows, loss_in
from allhands.loop.workers import strategy_from
from allhands.step.modes import evaluation_mode
from allhands.strategies import DDP, Single, Strategy
from allhands.verify.observed_calls import ObservedCalls
from allhands.verify.recorder import Recorder, Step
from allhands.verify.runs import (
    GlobalBatches,
    Trace,
    Variation,
    accumulate_for,
    bytes_of,
    doubled,
    freeze,
    smallest_cut,
    subject_of,
    watch_order,
)
from allhands.world import World


class Enough(SystemExit):
    """So many steps were recorded as was asked for; ends the script."""


class ScriptRun:
    """One run of the user's script in this process.

    Args:
        variation: what is different in it.
        stepped: called after every step.
        strategy: in place of the script's own; None keeps that.
        strategies: those that are compared, asked whether they are exact; none for the loop's own.
        largest: number of workers.
        examines: only look at the loop that the script makes.
        reference, keep: see `Recorder`.

    Attributes:
        own, accumulate, trained: the script's own strategy, accumulation, and loaders that are
            trained on.
        loops: how many were made.
        facts: what was found out about the loop.
        calls: that the script makes.
        trace: what was recorded.
        complete: nothing more is wanted of the script.
    """

    def __init__(
        self,
        variation: Variation,
        stepped: Callable[[], None],
        strategy: Strategy | None = None,
        strategies: Sequence[Strategy] = (),
        largest: int = 0,
        examines: bool = False,
        reference: list[Step] | None = None,
        keep: bool = False,
    ) -> None:
        self.variation, self.strategy = variation, strategy
        self.strategies, self.largest = strategies, largest
        self.examines, self._given, self._stepped = examines, (reference, keep), stepped
        self.loops, self.accumulate = 0, 1
        self.complete = False
        self.trained: list[Source] = []
        self.own: Strategy = DDP()
        self.facts: dict[str, Any] = {}
        self.calls = ObservedCalls()
        self.recorder: Recorder | None = None
        self.trace = Trace([])

    def adapt(self, given: dict[str, Any], data: Data, models: Mapping[str, Any]) -> None:
        """Change what the script has given to a loop or a runner into what this run wants, in
        place.

        Args:
            given: the arguments, by name.
            data: among them.
            models: among them, by name; changed in place too.
        """
        variation = self.variation
        sources = data.sources(given.get("seed", 42))
        self.trained = [source for source in sources.values() if source.trains]
        self.accumulate = given.get("accumulate", 1)
        given |= {"logdir": None, "resume": None, "save_every": None, "save_minutes": None}
        given |= {"step": "eager"}
        given.pop("strategy", None)
        if variation.alone_for:
            given["accumulate"] = accumulate_for(variation, self.accumulate, self.trained)
        if variation.double:
            given["precision"] = "fp32"
        for model in models.values():
            if isinstance(model, nn.Module):  # what else it is, the loop refuses
                freeze(model, variation.frozen)
                if variation.double:
                    model.double()

    def strategy_for(self, own: Any) -> Any:
        """The strategy of this run, in place of the script's own."""
        self.own = strategy_from(own) or DDP()
        if self.examines or self.variation.alone_for:
            return Single()
        return self.strategy or own

    def data_of(self, data: Data) -> Data:
        """The data of this run; schedules may follow what is evaluated."""
        return GlobalBatches(data, self.variation, self.accumulate, evaluates=True)

    def begin(self, loop: RecordedSteps) -> Recorder:
        """A loop was made."""
        self.loops += 1
        if self.recorder is None:
            self.recorder = Recorder(loop.world, *self._given)
            self.trace.steps = self.recorder.steps
        return self.recorder

    def stepped(self) -> None:
        """An optimizer has taken a step.

        Raises:
            Enough: all have taken enough.
        """
        self._stepped()
        assert self.recorder is not None
        if self.recorder.fewest >= self.variation.steps:
            self.leave()

    def leave(self) -> NoReturn:
        """End the script."""
        self.complete = True
        raise Enough(0)

    def end(self) -> dict[str, Any]:
        """What was recorded, as plain data."""
        self.calls.end()
        if self.recorder is not None:
            self.trace.unwrapped = self.recorder.unwrapped
        self.trace.draws, self.trace.collectives = self.calls.draws, self.calls.collectives
        return vars(self.trace)


class RecordedSteps(OwnSteps):
    """In place of the steps of a user's own loop or runner. Nothing is written and nothing
    resumed."""

    run: ClassVar[ScriptRun]

    def record(self) -> None:
        """The loop was made.

        Raises:
            Enough: the run only looks at the loop that the script makes.
        """
        run = self.run
        if run.examines:
            run.facts = self._facts()
            run.leave()
        self.recorder = run.begin(self)
        for name, group in self.groups.items():
            self.recorder.watch(group, self._label(name), self._prefix(group))
        for feed in self.trained:
            self.recorder.watch_feed(feed)
            watch_order(feed, run.trace.orders, run.variation.reverse)
            feed.epoch = run.calls.paused_in(feed.epoch)  # type: ignore[method-assign]
        self.stream += run.variation.stream

    def _label(self, name: str) -> str:
        label = name if len(self.groups) > 1 else ""
        number = self.run.loops
        return label if number == 1 else f"{label or 'optimizer'} of loop {number}"

    def _prefix(self, group: OptimizerGroup) -> str:
        """What makes the parameters' names those of all models of the script."""
        names = [name for name, model in self.models.items() if model is group.called]
        prefix = f"{names[0]}." if names and self.several else ""
        return prefix if self.run.loops == 1 else f"loop {self.run.loops}: {prefix}"

    def _facts(self) -> dict[str, Any]:
        run = self.run
        model = self.container if self.several else self.container["model"]
        subject = subject_of(model, self.settings.precision, self.world.device.type)
        subject.calls, subject.own_batches = "the step function", not self.trained
        return {
            "strategy": pickle.dumps(run.own),
            "exact": [
                all(
                    one.exact_for(group.optimizer, self.settings.clip_norm)
                    for group in self.groups.values()
                )
                for one in run.strategies or [run.own]
            ],
            "subject": vars(subject),
            "bytes": bytes_of(self.container),
            "cuts": [
                smallest_cut(run.trained, shares, run.accumulate) if run.trained else 2
                for shares in range(run.largest + 1)
            ],
        }

    # ------------------------------------------------------------------ steps

    def begin(self) -> None:
        super().begin()
        self.run.calls.begin()

    @contextmanager
    def evaluation_state(self) -> Iterator[None]:
        with self.run.calls.paused(), super().evaluation_state():
            yield

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        with self.run.calls.paused(), super().without_gradients():
            yield

    def step(  # type: ignore[override]
        self,
        fn: Callable[[Any], Any] | None = None,
        batch: Any = None,
        optimizer: str | None = None,
        again: bool = False,
    ) -> None:
        variation = self.run.variation
        self._end_before(optimizer)
        if fn is not None and not isinstance(batch, Batch):
            batch = self._own_batch(batch)
        if fn is not None and variation.by_rank:
            self._call_by_rank(fn, batch, optimizer)
        super().step(fn, batch, optimizer, again)
        if variation.cut > 1 and self.has_gathered:
            raise UserError("loop.gather gives the rows of one micro-batch")

    @contextmanager
    def accumulating(self, optimizer: str | None = None) -> Iterator[None]:
        self._end_before(optimizer)
        with super().accumulating(optimizer):
            yield

    def _end_before(self, optimizer: str | None) -> None:
        """End the script where the optimizer has taken enough steps, and others fewer."""
        group = self.groups[self._group_named(optimizer)]
        if self.recorder.number(group) >= self.run.variation.steps:
            self.run.leave()

    def _own_batch(self, own: Any) -> Batch:
        """Rows that this rank has made itself."""
        count, variation = rows_in(own) or 0, self.run.variation

        def part(begin: int, end: int) -> Any:
            return map_tensors(own, lambda t: t[begin:end] if t.dim() and len(t) == count else t)

        if variation.reverse:
            own = map_tensors(own, lambda t: t.flip(0) if t.dim() and len(t) == count else t)
        batch = Batch.of(self, own)
        self.recorder.see_own(count)
        if variation.cut > 1 and count > 1:
            cut = count // 2
            halves = [part(0, cut), part(cut, count)]
            batch = Batch(self, (halves, [cut, count - cut], batch.total, False))
        return batch

    def _call_by_rank(self, fn: Any, batch: Batch, optimizer: str | None) -> None:
        """Note what a step function gives on each rank for one micro-batch, of rank 0."""
        function, _ = self._function(fn, self._group_named(optimizer))
        if function.where in self.run.trace.by_rank:
            return
        rows = same_everywhere(batch.parts[0], self.world)
        with preserved_generators(), evaluation_mode(self.container), self.precision.autocast():
            seed_everything(0)
            loss: Any = loss_in(function(rows)[0], function.where)
        value = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        mine = torch.as_tensor(value).detach().double().reshape(1).to(self.world.device)
        values = [float(one) for one in all_gather_rows(mine, self.world)]
        self.run.trace.by_rank[function.where] = values

    def stepped(self, group: OptimizerGroup) -> None:
        self.recorder.stepped(group)
        super().stepped(group)
        self.run.stepped()

    def _observe(
        self, name: str, output: Any, count: int, loss: torch.Tensor, factor: float, items: Any
    ) -> None:
        self.recorder.observe(loss, factor, items)
        super()._observe(name, output, count, loss, factor, items)

    def to_device(self, batch: Any) -> Any:
        placed = super().to_device(batch)
        return doubled(placed) if self.run.variation.double else placed

    def _draw(self, draw: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        # A sample keeps its numbers, wherever it stands in the batch.
        reverse = self.run.variation.reverse

        def drawn(*args: Any, **options: Any) -> torch.Tensor:
            return draw(*args, **options).flip(0) if reverse else draw(*args, **options)

        numbers = super()._draw(drawn, shape)
        return numbers.double() if self.run.variation.double else numbers


class RecordedLoop(RecordedSteps, Loop):
    """In place of `allhands.Loop` in the user's script."""

    def __init__(self, **given: Any) -> None:
        run = self.run
        own = given.get("strategy") or given.pop("distributed", None)
        data = Data(given.get("loaders"), given.get("datasets"), optional=True)
        run.adapt(given, data, given.get("models") or {"model": given.get("model")})
        super().__init__(**given, strategy=run.strategy_for(own))
        self.record()

    def data_of(self, loaders: Any, datasets: Any) -> Data:
        return self.run.data_of(super().data_of(loaders, datasets))


def same_everywhere(rows: Rows, world: World) -> Rows:
    """Rank 0's rows of a micro-batch."""
    if world.world_size == 1:
        return rows
    held = [(rows.batch, rows.count, rows.total)]
    dist.broadcast_object_list(held, src=0, device=world.device)
    batch, count, total = held[0]
    return Rows(batch, count, 0, total)


def call_here(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int | None = None,
    device: str | None = None,
) -> Any:
    """In place of `allhands.spawn` in the user's script: the workers are there."""
    return fn(*args)
