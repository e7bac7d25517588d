"""What a mesh asks of the strategies that make parts of a model along its axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from allhands.strategies.base import TryOn
from allhands.strategies.degrees import Degrees
from allhands.strategies.fsdp_units import Units
from allhands.strategies.pipeline_passes import PipelinePasses
from allhands.strategies.tensor_plan import Style
from allhands.strategies.values import Values
from allhands.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardingSettings(Protocol):
    """Makes shards of parameters along dp.shard, as `FSDP` does."""

    activation_checkpointing: bool

    def check_wrapping(self, model: nn.Module) -> None: ...

    def check_device(self, world: World) -> None: ...

    def shard(self, model: nn.Module, mesh: DeviceMesh, values: Values, world: World) -> Units: ...


class SlicingSettings(Protocol):
    """Cuts layers into slices along tp, as `Tensor` does."""

    loss_parallel: bool

    def check_model(self, model: nn.Module, tp: int) -> dict[str, Style]: ...

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]
    ) -> dict[str, torch.Tensor]: ...


class StagingSettings(Protocol):
    """Cuts a model into stages along pp, as `Pipeline` does."""

    schedule: str
    balance: str

    def check_model(self, model: nn.Module, workers: int) -> None: ...

    def check_shards(self) -> None: ...

    def cut(
        self, model: nn.Module, mesh: DeviceMesh, world: World, try_on: TryOn | None
    ) -> PipelinePasses: ...


class MeshSettings(Protocol):
    """The degrees of a mesh, and what makes the parts along each axis; as `Meshed` has them."""

    fsdp: ShardingSettings | None
    tensor: SlicingSettings | None
    pipeline: StagingSettings | None
    level: bool

    def degrees_for(self, workers: int) -> Degrees: ...

    def place(self, world: World) -> tuple[int, int]: ...

    def slices(self, workers: int) -> SlicingSettings | None: ...
