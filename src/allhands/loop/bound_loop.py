"""A loop's binding to the world: its share of the data, and its strategy bound to models and
optimizers; anew where members of the world change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from allhands.data import CountedRows, Feed, build_feeds
from allhands.data.build import Source
from allhands.data.order import share_of
from allhands.data.replica_shares import put_together
from allhands.errors import UserError, WorldError
from allhands.loop.admission import terms_of
from allhands.loop.elastic import Elastic
from allhands.loop.grouped import GroupedLoop
from allhands.loop.joining import regrouping_of
from allhands.loop.loader_steps import LoaderSteps
from allhands.loop.loop_checkpoints import LoopCheckpoints
from allhands.loop.memory_forecast import MemoryForecast
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.position import Position
from allhands.loop.replica_steps import ReplicaSteps
from allhands.loop.reporter import Reporter
from allhands.loop.settings import LoopSettings, check_sync_batch_norm
from allhands.loop.task import Objective, Task
from allhands.step import LossRule, OptimizerStep, Precision
from allhands.world import World


class BoundLoop(GroupedLoop, ABC):
    """The part of a loop that is bound to the world.

    Attributes:
        task: what is known of the steps.
        elastic: goes on when members of the world change; None where they do not.
        forecast: says what a step takes of a GPU's memory.
        measures: what takes in the losses of each loader that is trained on, by name, and "" of
            steps without one.
        rules: gives what finds out how each loss counts.
    """

    #: Every rank has a micro-batch in every step, see `allhands.data.feed`.
    level = False
    elastic: Elastic | None = None
    checkpoints: LoopCheckpoints
    counts: bool
    slices: Any
    task: Task
    #: Called after the strategy is bound: the modules to call may be others.
    rebound: Callable[[], None] = staticmethod(lambda: None)
    # The logical workers that this rank trains, where they are more than ranks may be; and by
    # loader, the feeds of all but the first of them.
    _of_replicas: range | None = None
    _further: dict[str, list[Feed]]
    # The steps that are left of a loader that is trained on.
    _reading: LoaderSteps | None = None
    # The loader, samples and rows of a batch that no step was taken with.
    _open: tuple[Feed, int, CountedRows | None] | None = None

    def begin_binding(
        self, settings: LoopSettings, world: World, reporter: Reporter, task: Task
    ) -> None:
        """Bind it for the first time; the arguments are those of `BaseLoop`."""
        self.settings, self.world, self.reporter, self.task = settings, world, reporter, task
        self._steps: dict[tuple[int, str], OptimizerStep] = {}
        self.replica_steps = ReplicaSteps(self)
        regrouping = regrouping_of(
            terms_of(
                Elastic.trainings + 1,
                {name: part.model for name, part in self.parts(settings).items()},
                settings.strategy.in_words(),
            )
        )
        self.elastic = None if regrouping is None else Elastic(self, regrouping)
        self.measures: dict[str, Any] = {}
        self.rules: Callable[[], Iterable[LossRule]] = tuple
        settings.strategy.check(world)
        check_sync_batch_norm(settings.model, world)
        self.groups: dict[str, OptimizerGroup] = {}
        self.forecast = MemoryForecast(settings, world, reporter, task)
        self.bind()

    @property
    def held_by_ranks(self) -> list[str]:
        """Names of objects of the user's that each rank has for itself."""
        return []

    @abstractmethod
    def batches_left(self, feed: Feed, position: Position) -> Iterator[Any]:
        """The batches for this rank of the steps of the epoch that are left."""

    @abstractmethod
    def stepped(self, group: OptimizerGroup) -> None:
        """An optimizer has taken a step."""

    def parts(self, settings: LoopSettings) -> dict[str, LoopSettings]:
        """The settings of each optimizer group, by name."""
        return {"model": settings}

    def bind(self) -> None:
        """Give this rank its share of the data, and bind the strategy to models and optimizers, in
        the world as it is now; all ranks call it together."""
        settings, world = self.settings, self.world
        strategy, elastic = settings.strategy, self.elastic
        sources = settings.data.sources(settings.seed)
        replicas = None if elastic is None else elastic.replicas
        self._of_replicas, self._further = None, {}
        if replicas is None:
            self.feeds = self._feeds(sources, strategy.place(world))
        else:
            self._feed_replicas(sources, replicas)
        self.trained = [feed for name, feed in self.feeds.items() if name.startswith("train")]
        if not self.groups:
            self.groups = {
                name: OptimizerGroup(
                    part, world, self.task, self._try_on, self.reporter.line, elastic
                )
                for name, part in self.parts(settings).items()
            }
        else:
            for group in self.groups.values():
                group.bind()
        placement = next(iter(self.groups.values())).placement
        self.counts, self.slices, self.stream = placement.counts, placement.slices, placement.stream
        together = None if strategy.alone else world
        self._rows = {
            feed.name: CountedRows(feed, self.task.rows_of, together, self.counts)
            for feed in self.trained
            if feed.own_collate
        }
        self._steps.clear()
        if elastic is not None:
            elastic.tell_layout(placement)
        self.rebound()

    def _feeds(
        self, sources: dict[str, Source], place: tuple[int, int], compared: bool = False
    ) -> dict[str, Feed]:
        """This rank's view of loaders, as the one whose place is given.

        Args:
            sources: the loaders.
            place: the number of its share, and how many there are.
            compared: all ranks have the same data, which was looked at.
        """
        settings, elastic = self.settings, self.elastic
        strategy = settings.strategy
        return build_feeds(
            sources,
            self.world,
            settings.seed,
            settings.accumulate,
            settings.data.same_everywhere or compared,
            place,
            strategy.level or self.level,
            None if elastic is None else strategy.shares(elastic.began_with),
        )

    def _feed_replicas(self, sources: dict[str, Source], count: int) -> None:
        """Give this rank the shares of its logical workers, of which there are `count`."""
        world = self.world
        trained = {name: one for name, one in sources.items() if one.trains}
        others = {name: one for name, one in sources.items() if not one.trains}
        self._of_replicas = own = range(*share_of(count, world.rank, world.world_size))
        made = self._feeds(others, self.settings.strategy.place(world))
        made |= self._feeds(trained, (min(own.start, count - 1), count))
        self.feeds = {name: made[name] for name in sources}
        for number in own[1:]:
            for name, feed in self._feeds(trained, (number, count), True).items():
                self._further.setdefault(name, []).append(feed)

    def read(self, feed: Feed, epoch: int, skip: int) -> Iterator[Any]:
        """This rank's steps of an epoch of a loader that is trained on, after `skip` samples."""
        own = self._of_replicas
        if own is None:
            return feed.epoch(epoch, skip)
        assert self.elastic is not None
        steps = [feed.epoch(epoch, skip)]
        steps += [one.epoch(epoch, skip) for one in self._further.get(feed.name, [])]
        return put_together(steps, own.start, self.elastic.replicas or 1, bool(own))

    def feed_of_replica(self, name: str, number: int) -> Feed:
        """One logical worker's view of a loader that is trained on."""
        assert self.elastic is not None
        source = self.settings.data.sources(self.settings.seed)[name]
        place = number, self.elastic.replicas or 1
        return self._feeds({name: source}, place, True)[name]

    @property
    def place_read(self) -> tuple[str, int, int] | None:
        """Of the step that was read last: the loader, the epoch (or pass) and the samples before
        it; None where there is none."""
        return None if self._reading is None else self._reading.place

    def as_step(self, step: Any, first: int) -> Any:
        """A step of a feed as it is taken.

        Args:
            step: what the feed gave.
            first: position of its first sample in the global batch.
        """
        return step

    def step_setting(self, objective: Objective) -> Callable[[], AbstractContextManager[Any]]:
        """What gives a context in which a step that is taken again computes what it does now."""
        return nullcontext

    def unit(self, do: Callable[[], Any]) -> Any:
        """Do what all ranks do together, again where members of the world change meanwhile; its
        result, plain data that is the same on all ranks."""
        return do() if self.elastic is None else self.elastic.run(do)

    def _try_on(self, module: nn.Module, pieces: int) -> Callable[[], Any]:
        """Call a module on a micro-batch of the training data, of which `pieces` make a batch.

        Returns:
            What computes the loss of its output, as the criterion gives it.
        """
        if self.task.call is None:
            raise UserError(
                f"strategy '{self.settings.strategy.in_words()}' calls the model before the first "
                "step, which it cannot do where a step function of yours does; use "
                "SupervisedRunner, or a strategy or option that does not (DDP(bucket_cap_mb=25))"
            )
        feed = self.trained[0]
        batch = feed.example(max(2, -(-(feed.batch_size or 32) // pieces)))  # BatchNorm needs two
        precision = Precision(self.settings.precision, self.world.device)
        with precision.autocast():
            output, target = self.task.call(module, batch)

        def loss() -> Any:
            with precision.autocast():
                return self.task.criterion(output, target)

        return loss

    # ------------------------------------------------------------------ other members

    def _close_feeds(self) -> None:
        if self.passes is not None:
            self.passes.close()
        further = [feed for feeds in self._further.values() for feed in feeds]
        for feed in (*self.feeds.values(), *further):
            feed.close()

    def leave(self) -> None:
        """Let go of what belongs to the group, in which some rank may be gone."""
        for group in self.groups.values():
            group.close()
            group.exchange.finish(lost=True)
        self._close_feeds()

    def give_back(self, keep: bool) -> None:
        """After the training: put what was trained into the user's own objects, on ranks that
        `keep` it."""

        def give() -> None:
            for group in self.groups.values():
                group.state.give_back(keep)

        self.unit(give)
        self.checkpoints.close()  # which are open again where a worker was lost meanwhile

    def begin_anew(self) -> None:
        """Strategies are bound to other members, who have the same weights: steps follow."""
        for group in self.groups.values():
            group.begin(self.global_step)
        self.look()

    def renew_steps(self) -> None:
        """Read this rank's share from here on, in the world as it is now."""
        if self._reading is not None:
            self._reading.renew()

    def same_batch(self) -> Any:
        """This rank's share now of the global batch of the current iteration, as `step` takes
        it."""
        if self._reading is None:
            raise WorldError(
                "a worker was lost, and the batch is one of your own, of which nobody else has its "
                "rows; give the loop loaders=…, or write --max-restarts"
            )
        return self._reading.same()

    def look_again(self, joined: bool) -> None:
        """Look at the next losses as a rank does that begins with them; where one has `joined`, at
        the next iterations, too."""
        for rule in self.rules():
            rule.forget()

    def step_was_taken(self) -> None:
        self._open = None
