"""The plain model and optimizer of a training, out of what the ranks hold, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.strategies.alike import make_buffers_equal
from allhands.strategies.held import Held, Read
from allhands.strategies.shards import Shards, bring_shards, taken
from allhands.world import World


class ModelState:
    """The state of a model and an optimizer that this rank holds whole.

    Args:
        model: in training.
        optimizer: over its parameters.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world

    @property
    def members(self) -> MemberState:
        """What it is for others when the members of the world change."""
        return MemberState(self)

    # ------------------------------------------------------------------ equal on all ranks

    def collect(self) -> None:
        """Bring weights and the optimizer's state into the objects of the training, before they
        are saved."""

    def sync_buffers(self) -> None:
        """Make buffers (BatchNorm statistics), and weights where workers have their own, equal on
        all ranks; called before evaluation and saving."""

    @contextmanager
    def buffers_made_equal(self) -> Iterator[dict[str, torch.Tensor]]:
        """Within, buffers are what evaluation would see; yields this rank's own, which it has
        again afterwards."""
        own = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if own:
            self.sync_buffers()
        try:
            yield own
        finally:
            for name, buffer in self.model.named_buffers():
                if name in own:
                    buffer.copy_(own[name])

    # ------------------------------------------------------------------ for checkpoints

    def model_state(self) -> dict[str, Any]:
        """The plain model's ``state_dict``, of tensors, or of what this rank holds of them
        (`allhands.strategies.held.Held`)."""
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        """The same of the plain optimizer; all ranks call it together."""
        return self.optimizer.state_dict()

    def load_model_state(self, state: Mapping[str, Any], read: Read) -> None:
        """Go on from the plain model's ``state_dict``; ``read(value, held)`` brings slices of a
        value of it into ``held.local``.

        Raises:
            ValueError, RuntimeError, KeyError: it is of another model.
        """
        self.model.load_state_dict(state)

    def load_optimizer_state(self, state: Mapping[str, Any], read: Read) -> None:
        """The same for the optimizer."""
        self.optimizer.load_state_dict(dict(state))

    # ------------------------------------------------------------------ in memory

    def copy_weights(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's weights and buffers in the processor's memory, for
        `restore_weights`."""
        return {key: value.detach().cpu().clone() for key, value in self.model.state_dict().items()}

    def restore_weights(self, copy: dict[str, torch.Tensor]) -> None:
        """Go back to the weights of `copy_weights`."""
        self.model.load_state_dict(copy)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter of the plain model, on every rank; all call it together."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def whole_buffers(self) -> dict[str, torch.Tensor]:
        """The same of the buffers."""
        return dict(self.model.named_buffers())

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients, likewise; zeros where there is none. To be called between the
        exchange and the optimizer's step."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in self.model.named_parameters()
        }

    def give_back(self, keep: bool) -> None:
        """Put what was trained into the user's own objects, on ranks that `keep` it; all call it
        together."""


def read_nothing(value: Any, own: Held) -> None:
    """Nothing of what all ranks hold alike lies in parts."""


class MemberState:
    """What a rank's state is for others when the members of the world change.

    Args:
        state: of a strategy, bound to model and optimizer.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def model_alike(self) -> dict[str, Any]:
        """What all ranks hold alike of the model, without a word to another rank."""
        return self.state.model_state()

    def optimizer_alike(self) -> dict[str, Any]:
        """The same of the optimizer."""
        return self.state.optimizer.state_dict()

    def load_alike(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Go on from what `model_alike` and `optimizer_alike` gave on another rank."""
        self.state.model.load_state_dict(model)
        self.state.load_optimizer_state(optimizer, read_nothing)

    def detach(self) -> Shards:
        """Some rank is gone: put the optimizer over the plain parameters, without a state, and
        without a word to the others.

        Returns:
            What this rank holds for others too: of each parameter that it updates, by name; where
            it holds parts of the model, of these, and of buffers.
        """
        optimizer = self.state.optimizer
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in self.state.model.named_parameters() if id(p) in members}
        return taken(optimizer, named)

    def bring(self, shards: Shards, joined: Collection[int]) -> None:
        """Once the strategy is bound anew: have on each rank what it is to hold now; all ranks call
        it together.

        Args:
            shards: what `detach` gave on this rank before; of one that has joined, nothing.
            joined: the ranks that have joined.

        Raises:
            WorldError: something is lost.
        """
        bring_shards(shards, self.state.model, self.state.optimizer, self.state.world)


class ReplicatedState(ModelState):
    """The state of a model that every rank holds whole, with running statistics of its own."""

    def sync_buffers(self) -> None:
        if self.world.world_size > 1:
            make_buffers_equal(self.model, self.world)
