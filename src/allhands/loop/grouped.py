"""A loop's optimizer groups, and the one group of most loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.comm import all_gather_text
from allhands.data import Feed
from allhands.loop.lifecycle import Lifecycle
from allhands.loop.logged import Logged
from allhands.loop.loss_mean import LossMean
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.passes import DataPasses
from allhands.loop.schedule import Schedule
from allhands.step import Precision
from allhands.step.exchange import Exchange, Placement
from allhands.strategies import Strategy
from allhands.strategies.model_state import ModelState


class GroupedLoop(Lifecycle):
    """The part of a loop that knows its optimizer groups and its data.

    Attributes:
        groups: what is exchanged and updated together, by name.
        feeds: this rank's view of each loader, by name.
        trained: those that are trained on.
        passes: how far the data was read, where epochs have a length of their own; else None.
        measure: the losses of the loader that is trained on; None between two loaders.
        logged: further means of that loader.
        generators: those of the training, while an evaluation runs between two steps; else None.
        stream: number of the stream from which dropout draws on this rank.
    """

    groups: dict[str, OptimizerGroup]
    _first: str
    feeds: dict[str, Feed]
    trained: list[Feed]
    passes: DataPasses | None
    measure: LossMean | None
    logged: Logged
    generators: dict[str, torch.Tensor] | None
    stream: int

    @contextmanager
    def equal_between_steps(self) -> Iterator[None]:
        """Within, between two steps of an epoch, the models are as they are evaluated: equal on
        all ranks. All ranks call it together."""
        self.unit(self._make_equal_at_step)
        yield
        self.train_groups()

    def train_groups(self) -> None:
        """Steps follow: models and optimizers are in training mode."""

        def train() -> None:
            for group in self.groups.values():
                group.train()

        together = any(group.exchange.goes_on_together for group in self.groups.values())
        if together:
            self.unit(train)
        else:
            train()

    def _make_equal_at_step(self) -> None:
        for group in self.groups.values():
            group.make_equal(f"at step {self.global_step}")

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the models that are trained."""
        for name, group in self.groups.items():
            before = f"{name}/" if len(self.groups) > 1 else ""
            for key, buffer in group.model.named_buffers():
                yield before + key, buffer

    def takes_sums(self) -> bool:
        """Whether this rank goes on with sums that others have measured: the first of those whose
        measures count. All ranks call it together."""
        counting = all_gather_text("counts" if self.placement.counts else "", self.world)
        return self.world.rank == counting.index("counts")

    def step_was_taken(self) -> None:
        """The step of the current iteration is taken, and counted."""

    def copy_weights(self) -> Any:
        """A copy of this rank's weights and buffers in the processor's memory, for
        `restore_weights`."""
        return {name: group.state.copy_weights() for name, group in self.groups.items()}

    def restore_weights(self, copy: Any) -> None:
        for name, group in self.groups.items():
            group.state.restore_weights(copy[name])

    def look(self) -> None:
        """Code of the user's has run between two steps: forget captured steps that it has
        changed."""
        for group in self.groups.values():
            if group.captured is not None:
                group.captured.look()

    def follow_schedules(self, period: str, metric: float) -> None:
        """Let the schedules advance that step at every `period`, "epoch" or "evaluation"; `metric`
        is what a ReduceLROnPlateau looks at."""
        for group in self.groups.values():
            if group.schedule.steps_at(period):
                group.schedule.step(metric)

    @property
    def _group(self) -> OptimizerGroup:
        return self.groups[self._first]

    @property
    def strategy(self) -> Strategy:
        """What the workers exchange; where there are several groups, of the first."""
        return self._group.strategy

    @property
    def placement(self) -> Placement:
        """How the model lies on the ranks; where there are several groups, of the first."""
        return self._group.placement

    @property
    def exchange(self) -> Exchange:
        """What travels in a step; where there are several groups, of the first."""
        return self._group.exchange

    @property
    def state(self) -> ModelState:
        """The plain model and optimizer; where there are several groups, of the first."""
        return self._group.state

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are trained."""
        return self._group.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; where there are several, the first."""
        return self._group.optimizer

    @property
    def called(self) -> nn.Module:
        """The module to call in a step."""
        return self._group.called

    @property
    def precision(self) -> Precision:
        """The number format of forward passes."""
        return self._group.precision

    @property
    def schedule(self) -> Schedule:
        """The learning-rate schedule of the first optimizer."""
        return self._group.schedule
