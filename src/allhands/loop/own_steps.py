"""Steps that the user writes: what `allhands.Loop` and runners of one's own have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from allhands.data import Feed, rows_in
from allhands.errors import UserError, WorldError, kind_of
from allhands.loop.announce import report_epoch
from allhands.loop.base_loop import BaseLoop
from allhands.loop.epoch import Batch
from allhands.loop.loggers import Loggers
from allhands.loop.loop_checkpoints import LoopCheckpoints
from allhands.loop.loss_mean import LossMean
from allhands.loop.misuse import Misuse
from allhands.loop.model_groups import OwnModels, called_models, place_others, untrained
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.own_checkpoints import OwnCheckpoints
from allhands.loop.passes_by_hand import PassesByHand
from allhands.loop.reporter import Reporter
from allhands.loop.schedule import learning_rates
from allhands.loop.settings import LoopSettings
from allhands.loop.step_function import StepFunction, values_in
from allhands.loop.task import Objective, Task
from allhands.report.history import History, Values, new_history
from allhands.step import LossRule
from allhands.step.modes import evaluation_mode
from allhands.world import World


class Reports(BaseLoop):
    """The part of `allhands.Loop` that knows means, rows and the history.

    Attributes:
        measures: the losses of each loader that is trained on.
    """

    history: History
    measures: dict[str, LossMean]
    #: Of a training by steps, in all.
    num_steps = 0
    _loggers: Loggers | None = None
    # The optimizers that have taken a step in this epoch.
    _stepped: set[str]

    def _observe(
        self, name: str, output: Any, count: int, loss: torch.Tensor, factor: float, items: Any
    ) -> None:
        assert self.measure is not None
        self.measure.observe(output, count, loss, factor, items)
        if len(self.groups) > 1:
            self.logged.add(f"{name}_loss", loss.detach() * (factor / float(items)), float(items))
        for key, value in values_in(output).items():
            self.logged.add(key, value, count)

    def _record(self, epoch: int, values: Values, rates: list[float], seconds: float) -> None:
        row = {"epoch": epoch, "step": self.global_step, "lr": rates[0], "seconds": seconds}
        self.history.add(row, values)

    def _report(
        self,
        what: str,
        number: int,
        total: int | None,
        values: Values,
        rates: list[float],
        seconds: float,
    ) -> None:
        if self._loggers is not None:
            self._loggers.epoch(number, self.global_step, values, rates, seconds)
        place = f"{number}/{total}"
        report_epoch(self.reporter, what, place, values, rates[0], seconds, False)

    def means_so_far(self) -> dict[str, float]:
        """The means of the steps since this was asked for the last time."""
        measure = self.measure
        assert measure is not None
        values: dict[str, float] = {}
        if self._stepped:
            values = self.unit(lambda: self._means_of(measure))
        self.start_measure(measure)
        return values

    def report_step(self, number: int, values: Values) -> None:
        """Print a row of an iteration, and write it down."""
        rates, seconds = learning_rates(self.optimizer), self.seconds
        self._record(self.epoch + 1, values, rates, seconds)
        self._report("step", number, self.num_steps, values, rates, seconds)

    def measured(self, name: str) -> dict[str, float]:
        """The means of the steps of a loader in this epoch, over all ranks."""
        means: dict[str, float] = self.unit(lambda: self._means_of(self.measures[name]))
        return means

    def _means_of(self, measure: LossMean) -> dict[str, float]:
        values = measure.result() | self.exchange.epoch_values()
        if len(self.groups) > 1:
            del values["loss"]  # of several losses
        return values | self.logged.means(taken=values, everywhere=False)


class OwnSteps(PassesByHand, Reports):
    """A loop whose steps the user writes.

    Args:
        settings, world, reporter, checkpoints, epochs: see `BaseLoop`.
        own: what is trained; was checked.

    Attributes:
        models: the modules to call, by name.
        container: holds all models.
        several: models and optimizers have names.
        others: the models that no optimizer trains.
    """

    level = True
    #: The current batch of the loader.
    batch: Batch | None = None
    _is_loaders = False  # the batch of the step that is being taken
    #: What to write in the place of a backward pass or an update that the loop does not see.
    instead_of_passes = "write the loss as a function and call loop.step(loss_of, batch{})"

    def __init__(
        self,
        settings: LoopSettings,
        own: OwnModels,
        world: World,
        reporter: Reporter,
        checkpoints: Callable[[Any], LoopCheckpoints] = OwnCheckpoints,
        epochs: int | None = 0,
    ) -> None:
        self.several, self.container = own.several, own.container
        self._parts, self._models = own.parts(settings), own.models
        self.history = new_history()
        self.registered: dict[str, tuple[Any, bool]] = {}
        self._functions: dict[tuple[Any, str], tuple[StepFunction, Objective]] = {}
        self._stepped: set[str] = set()
        self._begun = {}
        self.misuse = Misuse(self)
        task = Task(
            None, None, rows_in, own_calls="the step function is your own", shows_gradients=True
        )
        super().__init__(settings, world, reporter, task, checkpoints, epochs)
        if any(group.exchange.passes is not None for group in self.groups.values()):
            raise UserError(
                f"strategy '{settings.strategy.name}': a pipeline runs the passes of a step in its "
                "own order, in which a step function cannot be called; use SupervisedRunner"
            )
        self.device = world.device
        self.measures = {
            feed.name: LossMean(world, trains=True, counts=self.counts) for feed in self.trained
        }
        self.rules = self._own_rules

    def parts(self, settings: LoopSettings) -> dict[str, LoopSettings]:
        return self._parts

    def bind(self) -> None:
        self.others = place_others(self._models, self._parts, self.world)
        self.misuse.take_off()  # the strategy may copy a model
        super().bind()
        self.models = called_models(self._models, self.groups)
        # Those that are called have modes of their own.
        self.container = nn.ModuleDict(self.models)
        #: Models that stay as they are while parts of copies are trained.
        self.untrained = untrained(self._models, self.models)
        self.misuse.follow()

    @property
    def held_by_ranks(self) -> list[str]:
        return [name for name, (_, each_rank) in self.registered.items() if each_rank]

    def look_again(self, joined: bool) -> None:
        super().look_again(joined)
        if joined:
            self.misuse.begin()

    def _own_rules(self) -> Iterator[LossRule]:
        return (function.rule for function, _ in self._functions.values())

    def same_batch(self) -> Any:
        batch = self.batch
        if not isinstance(batch, Batch) or not self._is_loaders:
            raise WorldError(
                "a worker was lost, and the batch is not the loader's own, so that nobody has the "
                "rows of the others; call loop.step(loss_of, batch) with what epoch.train gave, or "
                "write --max-restarts"
            )
        batch.renew(super().same_batch())
        return batch.as_step()

    @property
    def main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.rank == 0

    @property
    def model(self) -> nn.Module:
        """The module to call in a step function."""
        if self.several:
            names = ", ".join(f"loop.models[{name!r}]" for name in self.models)
            raise UserError(f"the loop has several models; write {names}")
        return self.models["model"]

    # ------------------------------------------------------------------ one step

    def step(  # type: ignore[override]
        self,
        fn: Callable[[Any], Any] | None = None,
        batch: Any = None,
        optimizer: str | None = None,
        again: bool = False,
    ) -> None:
        """Call a step function on this rank's micro-batches, and take a step of the optimizer with
        the gradient of the global batch. Without a function, take the step of what `backward` has
        added up.

        Args:
            fn: takes a micro-batch to its loss: one number, the mean over its samples; or ``(sum,
                count)``, what is divided by what; or a dict with a "loss" of either kind, whose
                further values are means to be reported. It is called on two parts of its first
                batch as well, to find out whether the loss is a mean over the samples.
            batch: of ``epoch.train``; or tensors, or a tree of them, of this rank's own.
            optimizer: its name, where there are several.
            again: the batch was used by this optimizer already.

        Raises:
            UserError: what `fn` gave is no loss; a wrong name; a batch that was used already.
        """
        name = self._group_named(optimizer)
        if fn is None:
            self.end_by_hand(name)
            return
        self._is_loaders = batch is self.batch
        if not isinstance(batch, Batch):
            batch = Batch.of(self, batch)
        if name in batch.used and not again:
            raise UserError(
                f"the batch was used for a step of '{name}' already; take the next one, or write "
                "loop.step(…, again=True) where it is meant"
            )
        batch.used.add(name)
        self._stepped.add(name)
        function, objective = self._function(fn, name)
        # Methods of one object are equal, and made anew each time.
        if function.fn != fn and self.groups[name].captured is not None:
            raise UserError(
                f"step='graph' replays {function.where} as it was captured, and another one was "
                "made; define it once, before the loop"
            )
        function.fn = fn
        self._drawing = batch.iteration, batch.steps
        batch.steps += 1
        with self.misuse.within, self.alone(self.groups[name]):
            super().step(objective, batch.as_step(), name)

    def take_optimizer_step(self, objective: Objective, name: str, batch: Any) -> None:
        self.misuse.agree(f"loop.step of '{name}'")
        super().take_optimizer_step(objective, name, batch)

    def as_step(self, step: Any, first: int) -> Any:
        return Batch(self, step, first).as_step()

    def step_setting(self, objective: Objective) -> Callable[[], AbstractContextManager[Any]]:
        function, drawing = objective.forward, self._drawing
        fn = function.fn

        @contextmanager
        def setting() -> Iterator[None]:
            before = function.fn, self._drawing
            function.fn, self._drawing = fn, drawing
            try:
                with self.misuse.within:
                    yield
            finally:
                function.fn, self._drawing = before

        return setting

    def alone(self, group: OptimizerGroup) -> AbstractContextManager[None]:
        """Within, no parameter of another group than this one needs a gradient."""
        if len(self.groups) == 1:
            return nullcontext()
        return group.alone([other for other in self.groups.values() if other is not group])

    def _function(self, fn: Any, name: str) -> tuple[StepFunction, Objective]:
        # A function that is made anew in each iteration has one code.
        key = getattr(fn, "__code__", None) or id(fn), name
        if key not in self._functions:
            function = StepFunction(self, fn, StepFunction.name_of(fn))
            function.rule.note = self.reporter.line
            self._functions[key] = function, function.objective(partial(self._observe, name))
        return self._functions[key]

    def _group_named(self, name: str | None) -> str:
        if name is None and len(self.groups) == 1:
            return self._first
        if name not in self.groups:
            raise UserError(
                f"loop.step(…, optimizer={name!r}); the optimizers are {', '.join(self.groups)}"
            )
        return name

    @property
    def evaluated_feeds(self) -> list[Feed]:
        """The loaders that are not trained on."""
        return [feed for feed in self.feeds.values() if feed not in self.trained]

    def check_used(self) -> None:
        """Raise `UserError` for an optimizer with which no step of the epoch was taken, where
        others were used, and for a step that was begun after its batches."""
        self.check_taken()
        unused = [name for name in self.groups if name not in self._stepped]
        if self._stepped and unused:
            raise UserError(
                f"no step used the optimizer '{unused[0]}' in {self.period} {self.epoch + 1}; "
                f"write loop.step(…, batch, optimizer={unused[0]!r}), or leave it out"
            )

    @contextmanager
    def evaluation_state(self) -> Iterator[None]:
        """Within, all models are as they are evaluated: equal on all ranks, in evaluation mode,
        without gradients. All ranks call it together."""
        position = self.position
        assert position is not None
        through = all(feed.name in position.done for feed in self.trained) and bool(position.done)
        if not position.evaluating and through:
            self.end_steps()
        between = nullcontext() if position.evaluating else self.equal_between_steps()
        with between, self.without_gradients():
            yield

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Within, all models are in evaluation mode, without gradients."""
        with evaluation_mode(self.container), torch.no_grad(), self.precision.autocast():
            yield
        for group in self.groups.values():
            group.placement.evaluated()

    # ------------------------------------------------------------------ what is saved

    def copy_weights(self) -> Any:
        others = {
            name: {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
            for name, model in self.others.items()
        }
        return super().copy_weights(), others

    def restore_weights(self, copy: Any) -> None:
        trained, others = copy
        super().restore_weights(trained)
        for name, model in self.others.items():
            model.load_state_dict(others[name])

    def register(self, name: str, value: Any, each_rank: bool = False) -> None:
        """Save an object with every checkpoint, and load it when a training goes on.

        Args:
            name: under which it is saved.
            value: has ``state_dict()`` and ``load_state_dict(state)``, made of numbers, strings,
                tensors, lists and dicts.
            each_rank: every rank has a state of its own (a replay buffer); it goes on with the same
                number of workers only.

        Raises:
            UserError: it has no state, or the training has begun.
        """
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UserError(
                f"loop.register({name!r}, {kind_of(value)}): it needs state_dict() and "
                "load_state_dict(state)"
            )
        if self.position is not None or self.epoch:
            raise UserError(f"loop.register({name!r}, …) comes before the first epoch or step")
        self.registered[name] = value, each_rank
