"""Trainings by optimizer steps that go on in their processes when a worker is lost, and take in one
that comes: see `allhands.loop.elastic_units`. Their units are steps, evaluations, saves, and rounds
of the agreement; a step is repeated with the same global batch, dealt out among those who are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allhands.data.feed import InMemoryFeed
from allhands.data.loaders import LoaderFeed
from allhands.data.sources import Sequential, Shuffled
from allhands.errors import WorldError
from allhands.launch import worker
from allhands.loop.elastic_units import ElasticUnits
from allhands.loop.shared_measures import SharedMeasures
from allhands.loop.standing import Standing
from allhands.loop.state_transfer import StateTransfer
from allhands.step.closure import takes_closure
from allhands.world.abort import check_not_aborted
from allhands.world.regroup import Regrouping

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.step import OptimizerStep
    from allhands.step.exchange import Placement


class Elastic(ElasticUnits):
    """Does the units of a training by optimizer steps.

    Args:
        loop: the training.
        regrouping: of its world.

    Attributes:
        brings_weights: the strategy is bound to weights that are brought over afterwards, and need
            not send them.
    """

    def __init__(self, loop: BoundLoop, regrouping: Regrouping) -> None:
        super().__init__(loop.world, regrouping)
        self.attach(loop)
        self.loop = loop
        self.measures = SharedMeasures(loop)
        self._transfer = StateTransfer(loop, self.progress, self.measures, self.joins)
        self.brings_weights = self.joins
        #: How many logical workers there are, see `allhands.Strategy.replicas`; None where ranks
        #: stand for no more than their share.
        self.replicas: int | None = None
        if len(loop.parts(loop.settings)) == 1:
            self.replicas = loop.settings.strategy.replicas(self.began_with)

    def begin_unit(self) -> None:
        super().begin_unit()
        self.measures.begin_unit()
        self._transfer.begin_unit()
        for group in self.loop.groups.values():
            if group.replicas is not None:
                group.replicas.begin_unit()

    def unit_done(self) -> None:
        for group in self.loop.groups.values():
            if group.replicas is not None:
                group.replicas.commit()

    def step(self, take: Callable[[Any], None], batch: Any) -> None:
        """Take an optimizer step with a batch, or where members change meanwhile, with this rank's
        new share of the same global batch."""

        def checked(share: Any) -> None:
            take(share)
            if self.progress.updates:  # the ranks have told one another what they have updated
                check_not_aborted(self.world)

        self._until_done(
            lambda: checked(batch), lambda: checked(self.loop.same_batch()), self._step_taken
        )

    def before_update(self, step: OptimizerStep, group: OptimizerGroup) -> None:
        """Before the update of a step, on all ranks, whose gradients are whole."""
        self.progress.step = step, group
        self.measures.share()
        self.regrouping.check()
        self.progress.updates = group.strategy.parted and self.world.world_size > 1

    def _step_taken(self) -> Any:
        self.measures.step_taken()
        self._transfer.keep_buffers()
        return self.loop.checkpoints.counted()

    def refused(self) -> str:
        """Why this training cannot go on in its processes, as a sentence; "" where it can."""
        loop = self.loop
        if loop.held_by_ranks:
            return f"'{loop.held_by_ranks[0]}' was registered with each_rank=True"
        for group in loop.groups.values():
            strategy = group.strategy
            if takes_closure(group.optimizer):
                kind = type(group.optimizer).__name__
                return (
                    f"{kind} asks the workers in the middle of its update, which cannot be repeated"
                )
            if strategy.parted and group.precision.scaler is not None:
                return "with precision='fp16' the workers decide within the update; write 'bf16'"
            if strategy.parted and callable(getattr(group.optimizer, "eval", None)):
                kind = type(group.optimizer).__name__
                return f"{kind} evaluates other weights than it trains; write DDP()"
            if why := strategy.regroup_refused() or self._refused_in_parts(group):
                return why
            if self.replicas is None and strategy.replicas(self.began_with) is not None:
                return f"strategy '{strategy.name}' is repeated with one optimizer, not several"
        for feed in loop.feeds.values():
            if not isinstance(feed, (InMemoryFeed, LoaderFeed)):
                return f"loader '{feed.name}' is a stream, which cannot be entered in the middle"
            if not isinstance(feed.order, (Sequential, Shuffled)):
                return f"loader '{feed.name}' has a sampler of its own, whose state one rank has"
            if self.replicas is not None and feed.own_collate:
                return f"loader '{feed.name}' has a collate_fn, whose rows one rank alone counts"
        return ""

    def tell_layout(self, placement: Placement) -> None:
        """Tell the launcher which workers hold a copy of the model together; a single copy is lost
        with any of them."""
        if placement.copy_size < self.began_with:
            worker.lay_out(placement.copy_size, placement.copy_runs)
        else:
            worker.lay_out(1, 1)

    def _refused_in_parts(self, group: OptimizerGroup) -> str | None:
        """The same of a model of which each rank holds a part."""
        placement, settings = group.placement, group.settings
        if placement.copy_size == 1:
            return None
        name = group.strategy.in_words()
        if placement.copy_size == self.began_with:
            return (
                f"strategy '{name}' keeps parts of one copy of the model on the workers, which are "
                "lost with one; with a second copy the whole one goes on: "
                "Mesh(dp={'replicate': 2, …}), and twice the workers"
            )
        if settings.step == "compile":
            return "what is compiled is lost with the parts of the model; write step='auto'"
        if settings.activation_checkpointing:
            return (
                "activation_checkpointing is set up once, and parts of the model are made anew; "
                "leave it out, or write FSDP(activation_checkpointing=True)"
            )
        if kept := self.loop.checkpoints.keeps_parts():
            return (
                f"{kept} keeps tensors in parts as the model's, which are made anew; leave it out"
            )
        return None

    def lost_for_good(self) -> str:
        for group in self.loop.groups.values():
            if group.strategy.keeps_residual:
                name = getattr(group.strategy, "compress", {})["name"]
                return f"; what was left over there of gradients (compress={name!r}) is lost"
        return ""

    def leave(self) -> None:
        self.loop.leave()

    def bind(self, standing: Standing) -> None:
        if self._transfer.end_update(standing):
            self._end_step()
        self._transfer.detach(standing)
        self.brings_weights = True
        self.loop.bind()

    def bring(self, standing: Standing) -> None:
        self._transfer.bring(standing)

    def begin_anew(self) -> None:
        self.loop.begin_anew()

    def _end_step(self) -> None:
        """The update of the step is made that was interrupted."""
        assert self.progress.step is not None
        if not self.measures.is_shared:
            raise WorldError(
                "a further worker was lost while the others made up for one, and with it what they "
                "had measured in the step. Write --max-restarts, and logdir= and resume='auto', so "
                "that all workers start again from the newest checkpoint"
            )
        _, group = self.progress.step
        self.loop.stepped(group)
        self.progress.done(None, self._step_taken())
