"""How many workers lie along each axis of the mesh: read, checked and laid out here, and nowhere
else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from allhands.checks import is_whole
from allhands.compat import forget_meshes
from allhands.errors import UserError, kind_of
from allhands.world import World
from allhands.world.subgroups import is_elastic, make_subgroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The axes, outermost first: ranks that differ in the last one only are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
#: Along this one, ranks hold the same parts.
COPIES = "dp_replicate"

# Making a mesh makes process groups; trainings that follow one another in a world share them.
# They end with the group of the world.
_made: WeakKeyDictionary[Any, dict[tuple[Any, ...], DeviceMesh]] = WeakKeyDictionary()


class Degrees(NamedTuple):
    """Workers along each axis: stages of a pipeline, whole copies, shards of a copy, slices of a
    layer."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """How many shares the samples are dealt out into."""
        return self.replicate * self.shard

    @property
    def product(self) -> int:
        """How many workers there must be."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        if 1 in (self.replicate, self.shard):
            dp = f"dp {self.dp}"
        else:
            dp = f"dp.replicate {self.replicate} x dp.shard {self.shard}"
        return f"pp {self.pp} x {dp} x tp {self.tp}"

    def check(self, workers: int) -> None:
        """Raise `UserError` unless they multiply to the number of workers; says what would fit."""
        if self.product == workers:
            return
        inner = self.pp * self.tp
        fits = f"set dp to {workers // inner}, or " if workers % inner == 0 else ""
        raise UserError(
            f"mesh: {self} = {self.product}, but there {'are' if workers != 1 else 'is'} {workers} "
            "worker"
            f"{'s' if workers != 1 else ''}; {fits}start {self.product} (workers={self.product})"
        )

    def over(self, workers: int) -> Degrees:
        """Those of as many copies as so many workers hold; themselves where no copy is whole."""
        parts = self.product // self.replicate
        copies, rest = divmod(workers, parts)
        return self if rest or not copies else self._replace(replicate=copies)

    def coordinates(self, rank: int) -> dict[str, tuple[int, int]]:
        """For each axis the index of `rank` on it, and how many there are."""
        found = {}
        for axis, count in zip(reversed(AXES), reversed(self), strict=True):
            rank, found[axis] = rank // count, (rank % count, count)
        return found

    def layout(self, world: World) -> DeviceMesh:
        """The mesh of these degrees over all ranks of the world, with the axes `AXES`."""
        from torch.distributed.device_mesh import init_device_mesh

        meshes = _made.setdefault(dist.group.WORLD, {})
        key = (world.device.type, *self)
        if key not in meshes:
            if is_elastic():
                meshes[key] = self._mesh_that_may_end(world)
            else:
                meshes[key] = init_device_mesh(world.device.type, tuple(self), mesh_dim_names=AXES)
        return meshes[key]

    def _mesh_that_may_end(self, world: World) -> DeviceMesh:
        """The mesh, with groups in which nobody waits long for a rank that is lost."""
        from torch.distributed.device_mesh import DeviceMesh

        forget_meshes()
        ranks = torch.arange(self.product).view(*self)
        groups = []
        for number, axis in enumerate(AXES):
            lines = ranks.movedim(number, -1).flatten(0, -2).tolist()
            made = [make_subgroup(line, desc=f"mesh_{axis}") for line in lines]
            own = next(place for place, line in enumerate(lines) if world.rank in line)
            groups.append(made[own])
        return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=AXES)


def read_degrees(pp: Any, dp: Any, tp: Any, shards: bool) -> Degrees:
    """The degrees that were written.

    Args:
        pp, tp: whole numbers.
        dp: a whole number, or ``{"replicate": 2, "shard": 4}``.
        shards: whether a plain number for dp is of shards, or of copies.
    """
    if isinstance(dp, Mapping):
        unknown = sorted(set(dp) - {"replicate", "shard"})
        if unknown:
            raise UserError(
                f"Mesh(dp=…) has no '{unknown[0]}'; write dp: {{replicate: 2, shard: 4}}, or a "
                "whole number"
            )
        replicate, shard = (
            _degree("dp.replicate", dp.get("replicate", 1)),
            _degree("dp.shard", dp.get("shard", 1)),
        )
    else:
        number = _degree("dp", dp)
        replicate, shard = (1, number) if shards else (number, 1)
    return Degrees(_degree("pp", pp), replicate, shard, _degree("tp", tp))


def _degree(name: str, value: Any) -> int:
    if not is_whole(value):
        shown = repr(value) if isinstance(value, (int, float, str)) else kind_of(value)
        raise UserError(f"Mesh: {name} is {shown}; it must be a whole number of at least 1")
    return value
