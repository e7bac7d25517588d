"""An optimizer, the model that it trains, and the strategy that is bound to the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.loop.capturing import captures_steps
from allhands.loop.schedule import Schedule
from allhands.loop.settings import LoopSettings
from allhands.loop.task import Objective, Task
from allhands.step import CapturedSteps, OptimizerStep, Precision
from allhands.step.closure import ClosureStep, takes_closure
from allhands.step.compile_choice import CompileChoice
from allhands.step.update import set_mode
from allhands.strategies.alike import check_buffers_equal
from allhands.strategies.base import BindOptions, Bound
from allhands.strategies.local_sgd_replicas import LocalReplicas
from allhands.world import World

if TYPE_CHECKING:
    from allhands.loop.elastic import Elastic


class OptimizerGroup:
    """What is exchanged and updated together: one optimizer and its model.

    Attributes:
        settings: those of the loop, with this group's model, optimizer, scheduler and strategy.
        model: the module that is evaluated and asked for its parameters.
        called: the module to call in a forward pass of a step.
        optimizer: the user's.
        strategy: its settings.
        placement, exchange, state: what the strategy, bound to the two, has given.
        schedule: of the optimizer.
        precision: with a loss scale of its own.
        captured: takes the steps from CUDA graphs; None where each is asked for anew.
    """

    def __init__(
        self,
        settings: LoopSettings,
        world: World,
        task: Task,
        try_on: Callable[[nn.Module, int], Any],
        say: Callable[[str], None],
        elastic: Elastic | None = None,
    ) -> None:
        self.settings, self.world = settings, world
        self.optimizer, self.strategy = settings.optimizer, settings.strategy
        model = settings.model
        self.precision = Precision(settings.precision, world.device)
        strategy = self.strategy
        if not strategy.takes_meta:
            model.to(world.device)
            if self.optimizer.state:  # a state from earlier training follows its parameters
                self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.schedule = Schedule(settings.scheduler)
        self._task, self._try_on, self._say = task, try_on, say
        self._elastic = elastic
        self._bound: Bound | None = None
        self.bind()

    def bind(self) -> None:
        """Bind the strategy to the model and the optimizer, in the world as it is now."""
        settings, world, scaler = self.settings, self.world, self.precision.scaler
        if scaler is not None and self.strategy.parted and world.world_size > 1:
            scaler.together = world
        self.captures = captures_steps(settings, world, self._task, scaler is not None, self._say)
        options = BindOptions(
            settings.seed,
            scaler,
            self._try_on,
            settings.clip_norm,
            self._elastic is not None and self._elastic.brings_weights,
            self._elastic is not None,
            None if self._elastic is None else self._elastic.replicas,
            self._bound,
        )
        self._bound = bound = self.strategy.bind(settings.model, self.optimizer, world, options)
        self.placement, self.exchange, self.state = bound.placement, bound.exchange, bound.state
        self.called, self.model = self.placement.module, self.placement.model
        #: Takes the steps from CUDA graphs; None where each is asked for anew.
        self.captured = self._captured_steps() if self.captures else None
        self._looked = False  # at what the first step has done to buffers

    @property
    def replicas(self) -> LocalReplicas | None:
        """The logical workers that this rank trains, where they are more than ranks may be."""
        return getattr(self.exchange, "replicas", None)

    def _captured_steps(self) -> CapturedSteps:
        task = self._task
        return CapturedSteps(
            self.model,
            task.criterion,
            self.optimizer,
            self.world.device,
            outputs=task.outputs,
            shows=task.shows_gradients,
            insist=self.settings.step == "graph",
            say=self._say,
        )

    def modules_here(self, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
        """Those of these modules of the user's model that this rank has, which may hold a part of
        it, with their names."""
        there = dict(self.model.named_modules())
        return [(name, there[name]) for name in names if name in there]

    @property
    def _choice(self) -> CompileChoice | None:
        return None if self.captured is None else self.captured.choice

    @property
    def chose_to_compile(self) -> bool:
        """Whether ``step="auto"`` has had the model compiled."""
        return self._choice is not None and self._choice.active

    def compile_as_before(self, chosen: Any) -> None:
        """The training goes on, in which `chose_to_compile` was this."""
        if chosen and self._choice is not None:
            self._choice.begin()

    def begin(self, step: int) -> None:
        """The training begins or goes on after optimizer step `step`."""
        self.exchange.begin(step)
        if self.captured is not None:
            self.captured.begin()

    def set_mode(self, training: bool) -> None:
        """Switch an optimizer whose weights in training are not those of evaluation."""
        if set_mode(self.optimizer, training) and self.world.world_size > 1:
            self.exchange.updated()

    def train(self) -> None:
        """Steps follow: the model and the optimizer are in training mode."""
        self.exchange.go_on()
        self.set_mode(training=True)
        self.model.train()
        self.called.train()
        if self.captured is not None:
            self.captured.look()

    def step_for(
        self, objective: Objective, kind: type[OptimizerStep] = OptimizerStep
    ) -> OptimizerStep:
        """What takes the steps of an objective until the epoch ends; of a `kind` of its own where
        the optimizer computes no loss again."""
        take = (ClosureStep if takes_closure(self.optimizer) else kind)(
            self.model.parameters(),
            self.optimizer,
            objective.rule,
            self.placement,
            self.exchange,
            self.world,
            self.precision,
            objective.forward,
            objective.observer(),
            objective.target_of,
            self.settings.clip_norm,
        )
        if not self._looked and self.world.world_size > 1:
            self._looked, take.before_first_update = True, self._look
        return take

    def _look(self, took_part: bool, loss: float | None) -> None:
        """Before the first update, on all ranks: what would make the result another one without a
        word."""
        check_buffers_equal(self.model, self.world, took_part)
        self.exchange.check_first_loss(loss)

    def make_equal(self, where: str) -> None:
        """After the steps of an epoch: buffers are made equal on all ranks, and weights
        compared."""
        self.set_mode(training=False)
        self.state.sync_buffers()
        self.exchange.check_equal(where)

    def updated(self) -> Iterator[torch.Tensor]:
        """The parameters that the optimizer updates, here or on another rank."""
        for group in self.optimizer.param_groups:
            yield from group["params"]
        yield from self.exchange.updated_elsewhere

    @contextmanager
    def alone(self, others: list[OptimizerGroup]) -> Iterator[None]:
        """Within, no parameter of the other groups needs a gradient."""
        own = set(map(id, self.updated()))
        frozen: list[torch.Tensor] = []
        for other in others:
            for parameter in other.updated():
                if parameter.requires_grad and id(parameter) not in own:
                    parameter.requires_grad_(False)
                    frozen.append(parameter)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def close(self) -> None:
        """The last step is taken, or none follows because of an error."""
        if self.captured is not None:
            self.captured.finish()
