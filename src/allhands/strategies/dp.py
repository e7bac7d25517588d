"""One process, a replica of the model on each GPU of the machine (torch.nn.DataParallel)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from allhands.errors import UserError
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.world import World


class DP(Strategy):
    """Each batch is split over the GPUs of this machine inside one process.

    The outputs are gathered before the loss, so the loss sees the whole batch and the result is
    that of one device. It is slower than `DDP`, and kept because it needs no second process.

    Args:
        devices: CUDA device numbers; None takes all visible ones.
    """

    name = "dp"

    def __init__(self, devices: Sequence[int] | None = None) -> None:
        self.devices = None if devices is None else [int(device) for device in devices]

    def check(self, world: World) -> None:
        if world.world_size > 1:
            raise UserError(
                "distributed='dp' is one process with several GPUs, but this is a world of "
                f"{world.world_size} processes; write distributed='ddp'"
            )
        found = torch.cuda.device_count()
        if world.device.type != "cuda" or found == 0:
            raise UserError(
                f"distributed='dp' needs GPUs; this machine shows {found} and the device is "
                f"'{world.device.type}'. On CPUs write "
                "distributed='ddp', which starts one process a core"
            )
        absent = [device for device in self.devices or () if not 0 <= device < found]
        if absent:
            raise UserError(
                f"DP(devices={self.devices}): no CUDA device {absent}; this machine shows {found} "
                f"(0 to {found - 1})"
            )

    def recomputing_refused(self) -> str | None:
        return (
            "DataParallel copies the model in every step, and copies would call what they are "
            "of; write distributed='ddp'"
        )

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        devices = (
            self.devices if self.devices is not None else list(range(torch.cuda.device_count()))
        )
        model.to(f"cuda:{devices[0]}")
        bound = super().bind(model, optimizer, world, options)
        bound.placement.module = nn.DataParallel(model, device_ids=devices)
        return bound
