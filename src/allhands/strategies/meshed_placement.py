"""Where a model in parts lies: cut into stages, slices and shards over a mesh of ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.comm.flat_layout import fused
from allhands.errors import WorldError
from allhands.step.exchange import Placement
from allhands.strategies.base import BindOptions
from allhands.strategies.degrees import AXES, COPIES
from allhands.strategies.fsdp_units import Units
from allhands.strategies.held import Held, held, nowhere
from allhands.strategies.mesh_parts import MeshSettings
from allhands.strategies.pipeline_passes import PipelinePasses
from allhands.strategies.values import Values, aliases
from allhands.world import World
from allhands.world.subgroups import make_subgroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshedPlacement(Placement):
    """What this rank has of a model that is cut over a mesh.

    Args:
        settings: of the strategy: degrees, and how parts are made along each axis.
        plain: the user's model, which stays as it is.
        world: the ranks.
        options: of the training.

    Attributes:
        at: for each axis the index of this rank, and how many there are.
        mesh: of all ranks; None for one.
        passes: runs the stages of a pipeline; None where there is one stage.
        units: what fully_shard gathers together, in each stage of this rank.
        held: what this rank has of each parameter and buffer of the plain model, by name.
        parameters: those that this rank has, by the plain model's names.
        local: likewise what the optimizer works on, plain tensors over the same memory.
        aliases: every name in the plain model's state, and the first name of that tensor.
        trained: names of the parameters that are trained here.
        loose: those of them that no shard group exchanges: they are whole on every rank of dp, or
            in slices of tp alone.
        shared: of the parameters that several stages hold, the group of the ranks that do.
    """

    def __init__(
        self, settings: MeshSettings, plain: nn.Module, world: World, options: BindOptions
    ) -> None:
        self.world, self.plain = world, plain
        self.degrees = degrees = settings.degrees_for(world.world_size)
        self.at = degrees.coordinates(world.rank)
        self.mesh: DeviceMesh | None = degrees.layout(world) if world.world_size > 1 else None
        self.passes: PipelinePasses | None = None
        self.units: list[Units] = []
        orders = self._cut(settings, options)
        super().__init__(self._module, world)
        self.share, self.shares = settings.place(world)
        self.counts = self.at["tp"][0] == 0 and self.at["pp"][0] == degrees.pp - 1
        self.stream = world.rank // degrees.tp
        self.level = settings.level
        self.layout = str(degrees)
        self.copy_size, self.copy_runs = degrees.product // degrees.replicate, degrees.pp
        self.slices = settings.slices(world.world_size)
        self._describe(orders)

    def _cut(self, settings: MeshSettings, options: BindOptions) -> Mapping[str, torch.Tensor]:
        """Make the module of this rank; gives the order of rows where it is another one."""
        degrees, world = self.degrees, self.world
        skeleton = _skeleton(self.plain)
        values = Values(self.plain, skeleton, world, options.seed, options.weights_follow)
        self._chunks: list[nn.Module] = [skeleton]
        orders: dict[str, torch.Tensor] = {}
        styles = None
        if degrees.tp > 1:
            assert settings.tensor is not None
            styles = settings.tensor.check_model(skeleton, degrees.tp)
        if degrees.pp > 1:
            assert settings.pipeline is not None
            assert self.mesh is not None
            self.passes = settings.pipeline.cut(skeleton, self.mesh, world, options.try_on)
            self._chunks = self.passes.chunks
            values.settle_stages(self._chunks)
        for chunk in self._chunks:
            if styles is not None:
                assert settings.tensor is not None
                assert self.mesh is not None
                values.settle(chunk)
                orders |= settings.tensor.parallelize(chunk, self.mesh["tp"], styles)
            if degrees.shard > 1:
                assert settings.fsdp is not None
                assert self.mesh is not None
                axes = ("dp_replicate", "dp_shard") if degrees.replicate > 1 else "dp_shard"
                self.units.append(settings.fsdp.shard(chunk, self.mesh[axes], values, world))
            values.settle(chunk)
        self._module = skeleton if self.passes is None else self.passes.model()
        return orders

    def _describe(self, orders: Mapping[str, torch.Tensor]) -> None:
        own: dict[str, torch.Tensor] = dict(self.module.named_parameters()) | dict(
            self.module.named_buffers()
        )
        stages_of = {} if self.passes is None else self.passes.shared
        names = [name for name, _ in self.plain.named_parameters()]
        self.aliases = aliases(self.plain)
        self.parameters = {name: own[name] for name in names if name in own}
        self.held: dict[str, Held] = {}
        for name, value in [*self.plain.named_parameters(), *self.plain.named_buffers()]:
            if name not in own:
                self.held[name] = nowhere(value.shape, value.dtype)
                continue
            found = held(own[name], self.at, orders.get(name))
            if name in stages_of:
                stages = stages_of[name]
                found = found.on_stages(self.at["pp"][0] == min(stages), len(stages))
            self.held[name] = found
        self.local = {name: self._local(name) for name in self.parameters}
        self.list_trained()
        groups = {
            stages: _group_of_stages(self.mesh, stages)
            for stages in sorted(set(map(tuple, stages_of.values())))
        }
        self.shared = {
            name: groups[tuple(stages)]
            for name, stages in stages_of.items()
            if name in self.parameters
        }

    def check_same_parts(self, before: Placement) -> None:
        """Raise `WorldError` unless this rank has the parts that it had in another world."""
        there = before.at if isinstance(before, MeshedPlacement) else {}
        moved = [axis for axis in AXES if axis != COPIES and there.get(axis) != self.at[axis]]
        if moved:
            raise WorldError(
                f"the workers that are left hold no whole copy of the model in their order "
                f"({moved[0]}). Write --max-restarts, and logdir= and resume='auto', so that all "
                "workers start again from the newest checkpoint"
            )

    def column(self, rank: int) -> list[int]:
        """The ranks that hold the parts that a rank holds, in the order of the copies."""
        own = self.degrees.coordinates(rank)
        found = []
        for other in range(self.world.world_size):
            at = self.degrees.coordinates(other)
            if all(at[axis] == own[axis] for axis in AXES if axis != COPIES):
                found.append(other)
        return found

    def _local(self, name: str) -> nn.Parameter:
        """What the optimizer works on: a plain tensor over the same memory."""
        parameter, part = self.parameters[name], self.held[name].local
        if part is parameter:
            return parameter  # type: ignore[return-value]
        assert part is not None
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def list_trained(self) -> None:
        """Look again which parameters require gradients."""
        self.trained = [
            name for name, parameter in self.parameters.items() if parameter.requires_grad
        ]
        self.loose = [name for name in self.trained if not _over_dp(self.parameters[name])]

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Another tensor has taken a parameter's place, whole on each rank; the optimizer does not
        know it."""
        with torch.no_grad():
            parameter.data = parameter.data.to(self.world.device)
            broadcast_tensors([parameter.data], self.world)
        for units in self.units:
            units.drop(self.parameters[name])
        self.parameters[name] = self.local[name] = parameter
        self.held[name] = held(parameter, self.at, None)

    def follow_memory(self, name: str) -> None:
        """fully_shard may give a shard other memory in the first forward pass (where it pins it),
        and stays with that."""
        local, part = self.local[name], getattr(self.parameters[name], "_local_tensor", None)
        if part is not None and part.data_ptr() != local.data_ptr():
            local.data = part.detach()
            self.held[name] = self.held[name].with_local(local)

    def sum_over(self, axis: str, values: list[torch.Tensor]) -> None:
        """Sum tensors over an axis in place, a message for each dtype."""
        if self.at[axis][1] == 1 or not values:
            return
        assert self.mesh is not None
        group = self.mesh.get_group(axis)
        for flat in fused(values):
            dist.all_reduce(flat, group=group)

    def held_parts(self) -> Mapping[str, Held] | None:
        if self.world.world_size == 1:
            return None
        return self.held | {
            name: self.held[first] for name, first in self.aliases.items() if first in self.held
        }

    def evaluated(self) -> None:
        """Without a backward pass, fully_shard keeps whole weights, which hide this rank's parts
        from whom asks the module."""
        if self.degrees.shard == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _skeleton(model: nn.Module) -> nn.Module:
    """The same modules with parameters of their own over the same memory; buffers are copies."""
    parameters = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    made: nn.Module = copy.deepcopy(model, dict(parameters))
    return made


def _over_dp(parameter: torch.Tensor) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and "dp_shard" in (mesh.mesh_dim_names or ())


def _group_of_stages(mesh: DeviceMesh | None, stages: tuple[int, ...]) -> Any:
    """The group of this rank's counterparts on some of the stages; every rank of the world makes
    all such groups."""
    assert mesh is not None
    mine = None
    for ranks in mesh.mesh.flatten(1).t().tolist():
        group = make_subgroup([ranks[stage] for stage in stages])
        if dist.get_rank() in ranks:
            mine = group
    return mine
