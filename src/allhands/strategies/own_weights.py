"""What a worker of `local_sgd` trains for itself, and the means of all workers in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from allhands.comm import calls
from allhands.errors import UserError
from allhands.strategies.local_sgd_fragments import cut_in_fragments, layers_of, weighted_mean
from allhands.strategies.local_sgd_settings import LocalSGDSettings
from allhands.strategies.optimizer_means import State, mean_state
from allhands.world import World


class SeveralStates(Protocol):
    """Logical workers of which a rank trains several, see
    `allhands.strategies.local_sgd_replicas`."""

    count: int

    def deltas(self) -> tuple[torch.Tensor, float]: ...

    def states(self) -> list[State]: ...


class OwnWeights:
    """A worker's own weights and state of the optimizer.

    Args:
        settings: of the strategy.
        model: the same on all workers.
        optimizer: over its parameters.
        world: the workers.

    Attributes:
        parts: the fragments of the model.
        parameters: those that are trained, in the order of the fragments.
        step: optimizer steps that were taken; None before the training begins.
        aside: by fragment, the weights with which this worker goes on while the model holds the
            mean of all; None while the model holds its own.
        optimizer_state: likewise of the optimizer.
    """

    def __init__(
        self,
        settings: LocalSGDSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
    ) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self._settings = settings
        self._cut()
        self.step: int | None = None
        self.aside: list[torch.Tensor | None] | None = None
        self.optimizer_state: State | None = None
        #: Of an elastic job, whose workers train several replicas each once some are lost.
        self.replicas: SeveralStates | None = None
        self._between = False

    def _cut(self) -> None:
        settings = self._settings
        self.parts = cut_in_fragments(layers_of(self.model), settings.fragments, settings.every)
        self.parameters = [p for part in self.parts for p in part.parameters]

    def begin(self, step: int) -> None:
        """The model holds the mean of all after optimizer step `step`; `aside` and
        `optimizer_state` are what this worker goes on with, if anything."""
        self.step = step
        self._between = True
        self._note_versions()

    @property
    def _is_one(self) -> bool:
        """Whether there is one worker, and one alone was there as the job began."""
        if self.world.world_size > 1:
            return False
        return self.replicas is None or self.replicas.count == 1

    def count_copies(self, sent: int) -> None:
        """Bytes were sent that are copies of this worker's replicas."""
        self._settings.sent_for_copies += sent

    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.parameters]

    # ------------------------------------------------------------------ the means of all

    def settle(self) -> None:
        """Let the model be the mean of the workers' present weights, until `take_up`."""
        self._put_aside()
        self._between = True

    def _put_aside(self) -> None:
        if self.aside is not None or self._is_one or self.step is None:
            return
        apart = [part for part in self.parts if not part.alike]
        own = None if self.replicas is None else self.replicas.deltas()
        self.aside = [None if part.alike else part.read() for part in self.parts]
        if apart:
            calls.note(("the mean of the weights after optimizer step", self.step))
            if own is None:
                deltas = [part.anchor - part.read() for part in apart]
                seen = [part.seen for part in apart]
            else:
                deltas, seen = [own[0]], [own[1]]
            self._settings.sent_for_means += weighted_mean(deltas, seen, self.world)
            for part, delta in zip(apart, deltas, strict=True):
                part.write(part.anchor - delta)
        self._note_versions()

    def settle_all(self) -> None:
        """Let the optimizer's state be the mean of the workers', too."""
        self._put_aside()
        if not self._is_one and self.step is not None and self.optimizer_state is None:
            states = None if self.replicas is None else self.replicas.states()
            state, sent = mean_state(self.optimizer, self.world, states)
            self._settings.sent_for_means += sent
            self.optimizer_state, self.optimizer.state = self.optimizer.state, state

    def take_up(self) -> None:
        """Go on with this worker's own weights and state."""
        self._lay_out_anew()
        aside, self.aside, self._between = self.aside, None, False
        if self.optimizer_state is not None:
            self.optimizer.state, self.optimizer_state = self.optimizer_state, None
        if aside is None:
            return
        versions = dict(zip(self.parameters, self._versions, strict=True))
        for part, own in zip(self.parts, aside, strict=True):
            if own is None:
                continue
            for name, parameter in zip(part.names, part.parameters, strict=True):
                if parameter._version != versions[parameter]:
                    raise UserError(
                        f"the weights of '{name}' were changed while they were the mean that is "
                        "evaluated and saved, and each worker goes on with its own weights; change "
                        "them in on_step_end, or set every to a divisor of the steps of an epoch"
                    )
            part.write(own)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Within, the model is the mean of all; afterwards it is what it was."""
        between = self._between
        self._put_aside()
        try:
            yield
        finally:
            self._between = between
            if not between:
                self.take_up()

    def _lay_out_anew(self) -> None:
        """Exchange what is trained now, where a callback has frozen, unfrozen or replaced
        parameters between two epochs."""
        settings = self._settings
        trained = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        changed = trained.keys() ^ {id(p) for p in self.parameters}
        if not changed or self.step is None:
            return
        if (
            settings.every > 1
            or settings.outer["name"] != "average"
            or settings.compress is not None
            or settings.mix
            or self.replicas is not None
        ):
            names = {id(p): name for name, p in self.model.named_parameters()}
            name = next(
                (names[key] for key in changed if key in names), "a parameter that was replaced"
            )
            raise UserError(
                f"'{name}' was frozen, unfrozen or replaced in the middle of the training, and "
                "local_sgd has laid out its exchanges before; train in two calls of train(), or "
                "write LocalSGD(every=1) (without --elastic)"
            )
        self.aside = None  # after each step the weights are those of all ranks
        self._cut()
        for part in self.parts:
            part.anchor = part.read()
        self._note_versions()
