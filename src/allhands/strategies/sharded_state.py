"""The optimizer's state dealt out to the workers of ddp, parameter by parameter.

The first stage of Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models, SC 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn, optim

from allhands.checks import check_choice
from allhands.strategies.held import Held, dealt, held, nowhere
from allhands.strategies.model_state import MemberState, ModelState, ReplicatedState
from allhands.strategies.repoint import Read, Repointed, check_elementwise
from allhands.strategies.shards import Shards
from allhands.world import World

STATES = ("whole", "sharded")
_MESSAGE = 25 * 2**20  # bytes of parameters that travel together


def check_state(optimizer_state: Any) -> None:
    """Raise `UserError` for a setting that there is not."""
    check_choice("optimizer_state", optimizer_state, STATES, of="DDP")


def check_shardable(settings: Any) -> None:
    """Raise `UserError` for settings of a training (`TrainSettings`) whose optimizer cannot be
    dealt out."""
    kind = type(settings.optimizer).__name__
    check_elementwise(
        settings.optimizer,
        "DDP(optimizer_state='sharded') lets each worker update some of the parameters, and "
        f"{kind} may look at all of them",
        "; or write DDP()",
    )


class ShardedState(ReplicatedState):
    """The state of a whole model and of an optimizer that is pointed at the parameters that this
    rank updates.

    Each parameter belongs to one rank, so that each has about the same number of bytes. All ranks
    have the whole gradients; after a step the owners send what they have updated to the others.

    Args:
        model: the same on all ranks.
        optimizer: the user's, over parameters of `model`.
        world: its ranks, of which there are several.
        twice: each rank also updates what the one before it does, to the same bits, so that a rank
            that is lost leaves its part of the state on the next one.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, world: World, twice: bool = False
    ) -> None:
        super().__init__(model, optimizer, world)
        plain = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in plain.items()}
        members = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        owners = dealt([plain[name].nbytes for name in members], world.world_size)
        described: dict[str, Held] = {}
        local: dict[str, nn.Parameter] = {}
        for name, owner in zip(members, owners, strict=True):
            parameter = plain[name]
            own = held(parameter, {}, None)
            if owner == world.rank:
                local[name], described[name] = parameter, own
            elif twice and (owner + 1) % world.world_size == world.rank:
                local[name] = parameter
                described[name] = dataclasses.replace(own, first=False, copies=2)
            else:
                described[name] = nowhere(parameter.shape, parameter.dtype)
        #: The parameters that other ranks update.
        self.elsewhere = [plain[name] for name in members if name not in local]
        #: Ranks, and the parameters that each sends in one message after it has updated them.
        self.messages = [
            (rank, message)
            for rank in range(world.world_size)
            for message in _messages(
                [plain[name] for name, owner in zip(members, owners, strict=True) if owner == rank]
            )
        ]
        self._repointed = Repointed(optimizer, plain, described, local, world)

    @property
    def members(self) -> MemberState:
        return ShardedMemberState(self, self._repointed)

    def optimizer_state(self) -> dict[str, Any]:
        return self._repointed.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any], read: Read) -> None:
        self._repointed.load_state_dict(state, read)

    def give_back(self, keep: bool) -> None:
        self._repointed.give_back(keep, self.world.device)


class ShardedMemberState(MemberState):
    """The same with an optimizer over this rank's parts."""

    def __init__(self, state: ModelState, repointed: Repointed) -> None:
        super().__init__(state)
        self._repointed = repointed

    def optimizer_alike(self) -> dict[str, Any]:
        return self._repointed.without_state()

    def detach(self) -> Shards:
        return self._repointed.detach()


def _messages(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    messages: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if parameter.nbytes > room:
            messages.append([])
            room = max(_MESSAGE, parameter.nbytes)
        messages[-1].append(parameter)
        room -= parameter.nbytes
    return messages
