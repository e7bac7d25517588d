"""What a loop puts into a checkpoint, and how it goes on from one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import calls
from allhands.data import derive_seed, seed_everything
from allhands.errors import UserError
from allhands.loop import checkpoint
from allhands.loop.checkpoint import tree
from allhands.loop.checkpoints import Checkpoints
from allhands.loop.generators import generator_states, set_generator_states
from allhands.loop.position import Position
from allhands.strategies import STRATEGIES

if TYPE_CHECKING:
    from allhands.loop.grouped import GroupedLoop
    from allhands.loop.optimizer_group import OptimizerGroup

FORMAT = 2
Tensors = dict[str, torch.Tensor]


class LoopCheckpoints(Checkpoints):
    """The checkpoints of a loop: what the ranks hold alike, and what each of them has alone.

    What there is once for each optimizer group stands as it is where there is one group, and in a
    dict by the groups' names where there are several.
    """

    loop: GroupedLoop

    def __init__(self, loop: GroupedLoop) -> None:
        super().__init__(loop)
        # Each rank's part of a checkpoint from the middle of an epoch that this rank takes up,
        # until that epoch goes on.
        self._own: list[Tensors] = []
        self._generators: Tensors | None = None
        self._logged: list[str] = []

    # ------------------------------------------------------------------ saving

    def save(
        self,
        position: Position | None,
        best: bool = False,
        metrics: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Path:
        loop = self.loop
        assert self._saver is not None
        calls.note(("saving a checkpoint after optimizer step", loop.global_step))
        state = self.state()
        own: Tensors = self.own()
        within = position is not None
        # Only rank 0 draws from the user's samplers, so what they need is its own.
        passes = loop.passes
        samplers, state["feeds"] = tree.split(
            {
                name: feed.state_dict(within or (passes is not None and passes.is_within(name)))
                for name, feed in loop.feeds.items()
            }
        )
        if loop.world.rank == 0:
            own |= {f"feeds/{key}": value for key, value in samplers.items()}
        for prefix, group in self._prefixes():
            tensors = group.exchange.own_tensors()
            own |= {f"{prefix}{key}": value.clone() for key, value in tensors.items()}
        state["position"] = position.to_dict() if position is not None else None
        summary = {
            "epoch": loop.epoch + within,
            "step": loop.global_step,
            "world_size": loop.world.world_size,
            "metrics": metrics or {},
        }
        if position is None:  # an epoch begins with new generators, equal buffers and empty metrics
            return self._saver.save(state, own, summary, None, best)
        generators = loop.generators or generator_states()
        own |= {f"generators/{key}": value for key, value in generators.items()}
        if loop.measure is not None:
            own |= {f"metrics/{key}": value for key, value in loop.measure.partial().items()}
            own |= {f"logged/{name}": value for name, value in loop.logged.partial().items()}
        # On another number of ranks, the training goes on from what evaluation would see; on this
        # one, from `own`.
        with self._buffers_made_equal() as buffers:
            own |= {f"buffers/{name}": value for name, value in buffers.items()}
            return self._saver.save(state, own, summary, loop.global_step, best)

    def own(self) -> Tensors:
        """Further tensors that this rank alone has."""
        return {}

    def state(self) -> dict[str, Any]:
        """What all ranks hold alike; all call it together."""
        for group in self.loop.groups.values():
            group.state.collect()
        return self.alike(in_memory=False)

    def alike(self, in_memory: bool) -> dict[str, Any]:
        """The same; `in_memory` without a word to another rank, and without what lies in parts on
        the ranks."""
        loop = self.loop
        model, optimizer = (
            (
                self._by_group(lambda group: group.state.members.model_alike()),
                self._by_group(lambda group: group.state.members.optimizer_alike()),
            )
            if in_memory
            else (
                self._by_group(lambda group: group.state.model_state()),
                self._by_group(lambda group: group.state.optimizer_state()),
            )
        )
        return {
            "format": FORMAT,
            "model": model,
            "optimizer": optimizer,
            "scheduler": self._by_group(lambda group: group.schedule.state_dict()),
            "scaler": self._by_group(_scaler_state),
            "compiled": self._by_group(lambda group: group.chose_to_compile),
            "epoch": loop.epoch,
            "step": loop.global_step,
            "strategy": {
                loop.strategy.name: self._by_group(lambda group: group.exchange.state_dict())
            },
            "passes": loop.passes.places if loop.passes is not None else None,
            "seed": loop.settings.seed,
            "world_size": loop.world.world_size,
            "layout": loop.placement.layout,
        }

    def _by_group(self, value_of: Callable[[OptimizerGroup], Any]) -> Any:
        values = {name: value_of(group) for name, group in self.loop.groups.items()}
        return values if len(values) > 1 else next(iter(values.values()))

    def _groups_of(self, value: Any, what: str) -> list[tuple[OptimizerGroup, Any]]:
        """Each group, and its part of what `_by_group` gave."""
        groups = self.loop.groups
        if len(groups) == 1:
            return [(next(iter(groups.values())), value)]
        if not isinstance(value, Mapping) or value.keys() != groups.keys():
            raise UserError(
                f"resume: the checkpoint's {what} is not that of the optimizers "
                f"{', '.join(groups)}; make the loop with the same optimizers, by the same names"
            )
        return [(group, value[name]) for name, group in groups.items()]

    def _prefixes(self) -> list[tuple[str, OptimizerGroup]]:
        """What stands before the names of each group's own tensors."""
        groups = self.loop.groups
        return [
            ("strategy/" if len(groups) == 1 else f"strategy/{name}/", group)
            for name, group in groups.items()
        ]

    @contextmanager
    def _buffers_made_equal(self) -> Iterator[Tensors]:
        """Within, buffers are what evaluation would see; yields this rank's own."""
        groups = self.loop.groups
        own: Tensors = {}
        with ExitStack() as stack:
            for name, group in groups.items():
                before = f"{name}/" if len(groups) > 1 else ""
                buffers = stack.enter_context(group.state.buffers_made_equal())
                own |= {before + key: buffer for key, buffer in buffers.items()}
            yield own

    # ------------------------------------------------------------------ going on

    @property
    def reads_whole(self) -> bool:
        return not self.loop.strategy.takes_meta

    def load_weights(self, path: Path) -> None:
        """Take the model's weights from a checkpoint, and leave all else."""
        path = checkpoint.resolve(path)
        state = checkpoint.load(path, self.reads_whole)
        with checkpoint.reader(path) as read:
            for group, model in self._groups_of(state["model"], "model"):
                group.state.load_model_state(model, read)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        loop, settings = self.loop, self.loop.settings
        if "rounds" in state:
            raise UserError(
                f"resume: {path} is of a federated training; go on with it by "
                "distributed=Federated(…)"
            )
        if state.get("format") != FORMAT:
            raise UserError(
                f"resume: {path} was written by another version of allhands (format "
                f"{state.get('format')})"
            )
        try:
            with checkpoint.reader(path) as read:
                self._load_trained(state, read)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"resume: the checkpoint is of another model or optimizer: {error}"
            ) from None
        self._load_schedules(state)
        loop.epoch, loop.global_step = state["epoch"], state["step"]
        if state["seed"] != settings.seed:
            loop.reporter.line(
                f"note: the checkpoint was made with seed={state['seed']}, this run goes on with "
                f"{settings.seed}"
            )
        self._load_passes(state)
        self._load_own(path, state)
        self.load_rest(state)

    def load_rest(self, state: dict[str, Any]) -> None:
        """Take from `state` what a kind of training has beside what its loop has."""

    def _load_trained(self, state: dict[str, Any], read: Any) -> None:
        for group, model in self._groups_of(state["model"], "model"):
            group.state.load_model_state(model, read)
        for group, optimizer in self._groups_of(state["optimizer"], "optimizer"):
            group.state.load_optimizer_state(optimizer, read)

    def _load_alike(self, state: dict[str, Any]) -> None:
        models = self._groups_of(state["model"], "model")
        optimizers = self._groups_of(state["optimizer"], "optimizer")
        for (group, model), (_, optimizer) in zip(models, optimizers, strict=True):
            group.state.members.load_alike(model, optimizer)

    def _load_schedules(self, state: dict[str, Any]) -> None:
        for group, scheduler in self._groups_of(state["scheduler"], "scheduler"):
            group.schedule.load_state_dict(scheduler)
        for group, scale in self._groups_of(state["scaler"], "scaler"):
            if group.precision.scaler is not None and scale is not None:
                group.precision.scaler.load_state_dict(scale)

    # ------------------------------------------------------------------ other members of the world

    def keeps_parts(self) -> str:
        """The name of an object, of those that are saved with the training, that keeps tensors
        which lie in parts on the ranks as the model does; "" where there is none."""
        return ""

    def in_memory(self) -> dict[str, Any]:
        """What a process needs that takes part from here on; of tensors and plain data. No other
        rank takes part."""
        position = self.loop.position
        state = self.alike(in_memory=True)
        return state | {"position": None if position is None else position.to_dict()}

    def join(self, state: dict[str, Any]) -> None:
        """Put a training that begins where `in_memory` was taken on another rank."""
        loop = self.loop
        self._load_alike(state)
        self._load_schedules(state)
        loop.epoch, loop.global_step = state["epoch"], state["step"]
        self._load_passes(state)
        if state["position"] is not None:
            loop.position = Position(**state["position"])
        self.load_rest(state)

    def counted(self) -> dict[str, Any]:
        """What a step has changed, beside weights and the optimizer's state."""
        loop, position = self.loop, self.loop.position
        assert position is not None
        return {
            "scheduler": self._by_group(lambda group: group.schedule.state_dict()),
            "scaler": self._by_group(_scaler_state),
            "step": loop.global_step,
            "samples": position.samples,
            "steps": position.steps,
            "passes": copy.deepcopy(loop.passes.places) if loop.passes is not None else None,
        }

    def catch_up(self, state: dict[str, Any], counted: dict[str, Any] | None) -> None:
        """Be as far as another rank is, which has done what this one was doing.

        Args:
            state: what `in_memory` gave there.
            counted: where that was a step: what `counted` gave after it.
        """
        loop, position = self.loop, self.loop.position
        self._load_alike(state)
        if counted is None:
            return
        assert position is not None
        self._load_schedules(counted)
        loop.global_step = counted["step"]
        position.samples, position.steps = counted["samples"], counted["steps"]
        if loop.passes is not None:
            loop.passes.places = counted["passes"]
        loop.step_was_taken()

    def _load_passes(self, state: dict[str, Any]) -> None:
        loop, written = self.loop, state.get("passes")
        epoch, position = state["epoch"], state["position"]
        places = {feed.name: [epoch, 0] for feed in loop.trained}  # of epochs that are passes
        if position is not None:
            places |= {name: [epoch + 1, 0] for name in position["done"]}
            current = next(
                (feed for feed in loop.trained if feed.name not in position["done"]), None
            )
            if current is not None:
                places[current.name] = [epoch, position["samples"]]
        if loop.passes is not None:
            loop.passes.places = {name: list(place) for name, place in (written or places).items()}
        elif written and any(
            samples and places.get(name) != [number, samples]
            for name, (number, samples) in written.items()
        ):
            raise UserError(
                "resume: the checkpoint was written with steps_per_epoch=… or max_steps=…, in the "
                "middle of a pass over the data; pass steps_per_epoch here too, or max_steps"
            )

    def _load_own(self, path: Path, state: dict[str, Any]) -> None:
        """What one rank alone had: the user's samplers, generators, buffers that differ between
        ranks, unfinished metrics."""
        loop, world, strategy = self.loop, self.loop.world, self.loop.strategy
        first = checkpoint.load_own(path, 0)
        feeds = tree.join(state["feeds"], tree.under(first, "feeds/"))
        for name, feed in loop.feeds.items():
            if name in feeds:
                feed.load_state_dict(feeds[name])
        before = state["world_size"]
        alike = before == world.world_size and state.get("layout", "") == loop.placement.layout
        nothing: Any = {name: {} for name in loop.groups} if len(loop.groups) > 1 else {}
        written = state["strategy"].get(strategy.name, nothing)
        for group, part in self._groups_of(written, "strategy"):
            group.exchange.load_state_dict(part)
        for group, chosen in self._groups_of(state.get("compiled", nothing), "compiled"):
            group.compile_as_before(chosen)
        for prefix, group in self._prefixes():
            self._load_strategys_own(path, state, first, prefix, group)
        if state["position"] is None:
            return
        self._logged = list(tree.under(first, "logged/"))
        loop.position = position = Position(**state["position"])
        unknown = [name for name in position.done if name not in loop.feeds]
        if unknown:
            raise UserError(
                f"resume: the checkpoint was written with a loader '{unknown[0]}', which this run "
                "does not have"
            )
        if alike:
            own = first if world.rank == 0 else checkpoint.load_own(path, world.rank)
            self._own = [own]
            self._generators = tree.under(own, "generators/")
            values = tree.under(own, "buffers/")
            for name, buffer in loop.named_buffers():
                buffer.copy_(values[name])
            return
        laid_out = f" ({state['layout']})" if state.get("layout") else ""
        loop.reporter.line(
            f"the checkpoint was written by {before} worker{'s' if before > 1 else ''}{laid_out}, "
            "and "
            f"{world.world_size} go on: with the same samples in the same order; dropout draws anew"
        )
        # Sums over ranks stay what they are when one rank holds all of them.
        if loop.takes_sums():
            self._own = [first, *(checkpoint.load_own(path, rank) for rank in range(1, before))]

    def _load_strategys_own(
        self, path: Path, state: dict[str, Any], first: Tensors, prefix: str, group: OptimizerGroup
    ) -> None:
        """What the strategy had on each rank; on another number of ranks, rank 0 has the sum of
        all."""
        before = state["world_size"]
        world, strategy = self.loop.world, group.strategy
        if not tree.under(first, prefix):
            return
        kept: Tensors = {}
        if before == world.world_size:
            kept = tree.under(
                first if world.rank == 0 else checkpoint.load_own(path, world.rank), prefix
            )
        elif world.rank == 0:
            kept = tree.under(first, prefix)
            for rank in range(1, before):
                for name, value in tree.under(checkpoint.load_own(path, rank), prefix).items():
                    kept[name] = kept[name] + value if name in kept else value
        (written,) = state["strategy"]
        if written == strategy.name and group.exchange.load_own_tensors(kept):
            return
        said = STRATEGIES[written].own_in_words.format(strategy=strategy.name)
        self.loop.reporter.line(f"note: the checkpoint holds {said}")

    def continue_epoch(self, position: Position) -> None:
        """Set generators and metrics to where they were, just before the interrupted epoch goes
        on."""
        loop = self.loop
        if self._generators is not None:
            set_generator_states(self._generators)
        else:
            seed_everything(
                derive_seed(
                    loop.settings.seed, "resumed", loop.epoch, loop.stream, loop.global_step
                )
            )
        if loop.measure is not None and position.steps:
            loop.measure.take_up([tree.under(own, "metrics/") for own in self._own])
            loop.logged.take_up([tree.under(own, "logged/") for own in self._own], self._logged)
        self._own, self._generators = [], None


def _scaler_state(group: OptimizerGroup) -> Any:
    scaler = group.precision.scaler
    return scaler.state_dict() if scaler is not None else None
