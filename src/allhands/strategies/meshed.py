"""What the strategies on a mesh share: a model of which each rank holds a part, and an optimizer
that works on that part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.strategies.degrees import Degrees
from allhands.strategies.mesh_parts import ShardingSettings, SlicingSettings, StagingSettings
from allhands.strategies.meshed_exchange import MeshedExchange
from allhands.strategies.meshed_placement import MeshedPlacement
from allhands.strategies.meshed_state import MeshedState
from allhands.strategies.repoint import Repointed, check_optimizer
from allhands.world import World


class Meshed(Strategy):
    """The base of the strategies on a mesh.

    The user's model is not touched: a copy of its structure is cut into stages, its layers into
    slices, and those into shards, and the optimizer is pointed at what is left on this rank.
    Samples are dealt out over dp alone: ranks that differ only in tp or pp see the same ones. When
    the training has ended, the state's `give_back` writes into the user's own objects.

    Attributes:
        fsdp, tensor, pipeline: how parts are made along dp.shard, tp and pp; an axis of degree 1
            leaves its own unused.
    """

    takes_step = True
    parted = True
    level = True
    takes_meta = True
    check_weights_every = 1000

    fsdp: ShardingSettings | None = None
    tensor: SlicingSettings | None = None
    pipeline: StagingSettings | None = None

    def degrees_for(self, workers: int) -> Degrees:
        """How many workers lie along each axis."""
        raise TypeError(f"{type(self).__name__} does not say its degrees")

    # ------------------------------------------------------------------ before anything is started

    def check_size(self, workers: int) -> None:
        self.degrees_for(workers).check(workers)

    def check(self, world: World) -> None:
        self.check_size(world.world_size)

    def check_settings(self, settings: Any) -> None:
        check_optimizer(settings.optimizer, self.name)

    def check_training(self, settings: Any, workers: int) -> None:
        degrees, model = self.degrees_for(workers), settings.model
        if workers > 1:
            _check_leaves(model, self.name)
        if degrees.pp > 1 and self.pipeline is not None:
            self.pipeline.check_model(model, degrees.pp)
        if degrees.tp > 1 and self.tensor is not None:
            self.tensor.check_model(model, degrees.tp)
            if any(parameter.is_meta for parameter in model.parameters()):
                raise UserError(
                    f"the model is on the meta device and tp is {degrees.tp}; slices of layers are "
                    "cut from weights that are there. Set tp to 1, or build the model on the CPU"
                )
        if degrees.shard > 1 and self.fsdp is not None:
            self.fsdp.check_wrapping(model)

    def compile_refused(self, workers: int) -> str | None:
        degrees = self.degrees_for(workers)
        if degrees.tp > 1:
            return (
                "slices of layers (tp) are put together by hooks, past which the compiler reads "
                "the weights"
            )
        if (
            degrees.pp > 1
            and self.pipeline is not None
            and (self.pipeline.schedule == "zero_bubble")
        ):
            return (
                "schedule='zero_bubble' takes the backward pass of a layer in two, and a compiled "
                "layer has one; schedule='1f1b' does not"
            )
        return None

    def compiled(self, workers: int) -> str:
        if self.degrees_for(workers).pp > 1:
            return "only layers"
        return "layers" if workers > 1 else "model"

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        if self.degrees_for(world.world_size).pp > 1:
            return (
                "the ranks of a pipeline tell one another the sizes of their micro-batches in each "
                "step; write pp=1"
            )
        return None

    def over_batch_refused(self, workers: int) -> str | None:
        degrees = self.degrees_for(workers)
        if degrees.pp > 1:
            return (
                "micro-batches go back through a pipeline before all have left it; write "
                "distributed='fsdp' or pp=1"
            )
        if degrees.tp > 1 and self.tensor is not None and self.tensor.loss_parallel:
            return "loss_parallel=True leaves the outputs in slices; set loss_parallel to False"
        return None

    def recomputing_refused(self) -> str | None:
        if self.fsdp is not None and self.fsdp.activation_checkpointing:
            return (
                "FSDP(activation_checkpointing=True) says so already; write FSDP(), or leave "
                "activation_checkpointing out"
            )
        if self.pipeline is not None and self.pipeline.schedule == "zero_bubble":
            return (
                "schedule='zero_bubble' takes the backward pass of a layer in two; write "
                "Pipeline(schedule='1f1b')"
            )
        return None

    def regroup_refused(self) -> str | None:
        if self.pipeline is not None and self.pipeline.balance == "measured":
            return (
                "Pipeline(balance='measured') may cut the model elsewhere with other workers; "
                "write balance='parameters', or stages=[…]"
            )
        return None

    # ------------------------------------------------------------------ who sees what

    def shares(self, workers: int) -> int:
        return self.degrees_for(workers).dp

    def place(self, world: World) -> tuple[int, int]:
        degrees = self.degrees_for(world.world_size)
        return world.rank // degrees.tp % degrees.dp, degrees.dp

    def slices(self, workers: int) -> SlicingSettings | None:
        return self.tensor if self.degrees_for(workers).tp > 1 else None

    # ------------------------------------------------------------------ in each worker

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        self.degrees_for(world.world_size).check(world.world_size)
        placement = MeshedPlacement(self, model, world, options)
        if options.before is not None:
            placement.check_same_parts(options.before.placement)
        repointed = Repointed(
            optimizer, dict(model.named_parameters()), placement.held, placement.local, world
        )
        joins = options.weights_follow and options.before is None
        exchange = MeshedExchange(self.name, placement, repointed, options.scaler, joins)
        return Bound(placement, exchange, MeshedState(placement, repointed))


def _check_leaves(model: nn.Module, strategy: str) -> None:
    """Raise `UserError` for a module with a tensor that is computed from parameters, of which there
    can be no copy."""
    for name, module in model.named_modules():
        computed = [
            key
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ]
        if computed:
            raise UserError(
                f"'{name}' keeps '{computed[0]}', which is computed from its parameters "
                f"(torch.nn.utils.weight_norm does so), and strategy '{strategy}' copies the "
                "model's structure; use torch.nn.utils.parametrizations.weight_norm, or write "
                "distributed='ddp'"
            )
