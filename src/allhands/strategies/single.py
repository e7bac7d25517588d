"""One process, one device: the training that every other strategy must reproduce."""

from __future__ import annotations

from torch import nn

from allhands.errors import UserError
from allhands.strategies.base import Strategy
from allhands.world import World


class Single(Strategy):
    """All of the model and all of the data in one process; nothing is exchanged."""

    name = "single"
    whole_model = True

    def check(self, world: World) -> None:
        if world.world_size > 1:
            raise UserError(
                "distributed='single' trains in one process, but this is a world of "
                f"{world.world_size}; write distributed='ddp', or start the script once"
            )

    def regroup_refused(self) -> str | None:
        return None

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        return None
