"""Strategies put together on one mesh of workers."""

from __future__ import annotations

from collections.abc import Mapping

from allhands.errors import UserError, kind_of
from allhands.strategies.degrees import Degrees, read_degrees
from allhands.strategies.fsdp import FSDP
from allhands.strategies.meshed import Meshed
from allhands.strategies.pipeline import Pipeline
from allhands.strategies.tensor import Tensor
from allhands.world import World
from allhands.world.regroup import began_with


class Mesh(Meshed):
    """Strategies together on one mesh of workers, with the axes pp, dp and tp.

    Stages of a pipeline (pp) are furthest apart, slices of layers (tp) are neighbours. Ranks that
    differ only in pp or tp see the same samples. Degree 1 leaves a part out, so that one script
    runs at any degrees.

    Args:
        pp: stages of the pipeline.
        dp: a number, or ``{"replicate": 2, "shard": 4}``: whole copies, each in so many shards. A
            number is of shards where `fsdp` is given, else of copies.
        tp: slices of layers.
        fsdp: how copies are sharded; None takes `FSDP()` where there are shards.
        tensor: how layers are sliced; None takes `Tensor()` where tp is above 1.
        pipeline: how the model is cut into stages; None takes `Pipeline()` where pp is above 1.

    Raises:
        UserError: a degree is no whole number of at least 1; a part is of another kind, or does not
            go with another.
    """

    name = "mesh"
    copies_alike = True

    def __init__(
        self,
        pp: int = 1,
        dp: int | Mapping[str, int] = 1,
        tp: int = 1,
        fsdp: FSDP | None = None,
        tensor: Tensor | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        for key, part, kind in (
            ("fsdp", fsdp, FSDP),
            ("tensor", tensor, Tensor),
            ("pipeline", pipeline, Pipeline),
        ):
            if part is not None and not isinstance(part, kind):
                raise UserError(f"Mesh({key}=…) is {kind_of(part)}; write {key}={kind.__name__}()")
        self._degrees = read_degrees(pp, dp, tp, fsdp is not None)
        self.fsdp = fsdp or (FSDP() if self._degrees.shard > 1 else None)
        self.tensor = tensor or (Tensor() if tp > 1 else None)
        self.pipeline = pipeline or (Pipeline() if pp > 1 else None)
        if self._degrees.pp > 1 and self._degrees.shard > 1 and self.pipeline is not None:
            self.pipeline.check_shards()

    def degrees_for(self, workers: int) -> Degrees:
        return self._degrees.over(workers)

    def check_size(self, workers: int) -> None:
        self._degrees.check(began_with() or workers)

    def size_wanted(self) -> int | None:
        return self._degrees.product

    def check(self, world: World) -> None:
        super().check(world)
        if self._degrees.shard > 1 and self.fsdp is not None:
            self.fsdp.check_device(world)
