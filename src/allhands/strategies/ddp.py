"""Data parallelism: a whole model on every worker, gradients all-reduced while the backward pass
runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.comm.codecs import cast_dtype
from allhands.errors import UserError
from allhands.step.exchange import Placement
from allhands.strategies.base import BIND_OPTIONS, BindOptions, Bound, Strategy
from allhands.strategies.compressed import check_compress, check_compressible
from allhands.strategies.ddp_exchange import DDPExchange, is_sparse
from allhands.strategies.measured import check_cap
from allhands.strategies.model_state import ReplicatedState
from allhands.strategies.sharded_state import ShardedState, check_shardable, check_state
from allhands.world import World


class DDP(Strategy):
    """The model on every worker, 1/N of each global batch, gradients all-reduced every step.

    Gradients travel in buckets while the backward pass goes on. Parameters may take no part in a
    step, on some ranks or on all: a gradient that a rank has not made counts as zero there, and a
    parameter without one on all ranks is left alone. The model is not wrapped, so that
    ``handle_batch`` may call any part of it. Initial weights and buffers are rank 0's. BatchNorm
    uses each rank's own batch in training, unless `sync_batchnorm` is set; its running statistics
    are averaged over the ranks before evaluation and saving, other buffers are rank 0's.

    Args:
        find_unused_parameters: has no effect, since parameters may always be unused; accepted for
            scripts that set it.
        sync_batchnorm: compute BatchNorm statistics over all ranks (torch.nn.SyncBatchNorm; needs
            GPUs).
        bucket_cap_mb: size in MB of the buckets in which gradients travel; None keeps PyTorch's
            default of 25, the first of 1. "measured" takes the one of a few sizes with which a step
            on the first samples is the fastest, and prints it; a resumed training keeps it.
        static_graph: has no effect; accepted, with a warning, for scripts that set it.
        check_weights_every: compare the ranks' weights every so many optimizer steps (and at the
            end of each epoch); 0 never compares.
        compress: "fp16", "bf16": gradients travel so and are added up in fp32. "int8", "1bit",
            "2bit", "topk", or ``{"name": "topk", "keep": 0.01}``: they travel in fewer bits, and
            what is lost is added to the next step's gradient. "powersgd", ``{"name": "powersgd",
            "rank": 1, "start": 10}``: of each gradient matrix two thin factors travel, after
            `start` steps that are exchanged as they are (Vogels et al., NeurIPS 2019). None of
            these computes what one process does (`exact` is False). None sends gradients as they
            are. A step in which some worker has no sample is exchanged as it is.
        powersgd_rank, powersgd_start: old spellings of the options of powersgd.
        optimizer_state: "sharded": each worker keeps the optimizer's state of about 1/N of the
            parameters, updates those, and sends them to the others (ZeRO's first stage, Rajbhandari
            et al., SC 2020), to the same bits. "whole": each keeps all.

    Raises:
        UserError: a setting that there is not, or that has no meaning beside the others.
    """

    name = "ddp"
    whole_model = True

    def __init__(
        self,
        find_unused_parameters: bool = False,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | str | None = None,
        static_graph: bool = False,
        check_weights_every: int = 1000,
        compress: str | Mapping[str, Any] | None = None,
        powersgd_rank: int | None = None,
        powersgd_start: int | None = None,
        optimizer_state: str = "whole",
    ) -> None:
        check_state(optimizer_state)
        check_cap(bucket_cap_mb)
        self.compress = check_compress(
            compress, powersgd_rank, powersgd_start, find_unused_parameters
        )
        if static_graph:
            warnings.warn(
                "DDP(static_graph=True) has no effect; leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.sync_batchnorm = sync_batchnorm
        self.bucket_cap_mb = bucket_cap_mb
        self.check_weights_every = check_weights_every
        if self.compress is not None:
            self.exact = False
            self.keeps_residual = cast_dtype(self.compress) is None
        self.parted = optimizer_state == "sharded"
        self.copies_alike = not self.parted

    def check_settings(self, settings: Any) -> None:
        if self.parted:
            check_shardable(settings)

    def check_training(self, settings: Any, workers: int) -> None:
        if self.compress is not None and workers > 1:
            check_compressible(self.compress, settings.model, settings.precision)

    def regroup_refused(self) -> str | None:
        if self.sync_batchnorm:
            return (
                "DDP(sync_batchnorm=True) takes its statistics over the micro-batches of all "
                "workers, into which fewer workers cut a global batch otherwise; write DDP(), or "
                "use GroupNorm"
            )
        return None

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        if world.world_size == 1:
            return None
        if self.sync_batchnorm:
            return "with several workers DDP(sync_batchnorm=True) decides on the host; write DDP()"
        if self.compress is not None and cast_dtype(self.compress) is None:
            name = self.compress["name"]
            return (
                f"DDP(compress={name!r}) keeps on the host what it has left over of gradients; "
                "compress='bf16' does not"
            )
        sparse = next((name for name, module in model.named_modules() if is_sparse(module)), None)
        if sparse is None:
            return None
        return f"'{sparse}' has sparse gradients; make it with sparse=False"

    def check(self, world: World) -> None:
        if self.sync_batchnorm and world.world_size > 1 and world.device.type != "cuda":
            raise UserError(
                "DDP(sync_batchnorm=True) needs GPUs: torch.nn.SyncBatchNorm has no "
                f"{world.device.type} implementation. Write DDP(), which averages BatchNorm "
                "statistics before evaluation and saving, or use GroupNorm"
            )

    def bind(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: BindOptions = BIND_OPTIONS,
    ) -> Bound:
        if world.world_size == 1:
            return super().bind(model, optimizer, world, options)
        module = nn.SyncBatchNorm.convert_sync_batchnorm(model) if self.sync_batchnorm else model
        if not options.weights_follow:
            broadcast_tensors(
                [*(p.detach() for p in module.parameters()), *module.buffers()], world
            )
        sharded = ShardedState(module, optimizer, world, options.may_lose) if self.parted else None
        exchange = DDPExchange(
            module, optimizer, world, self.bucket_cap_mb, self.compress, options, sharded
        )
        state = ReplicatedState(module, optimizer, world) if sharded is None else sharded
        return Bound(Placement(model, world, module), exchange, state)

    def compiled(self, workers: int) -> str:
        return "layers" if workers > 1 else "model"

    def in_words(self) -> str:
        if self.compress is None:
            return self.name
        name = self.compress["name"]
        return f"{self.name}, " + (
            f"powersgd {self.compress['rank']}" if name == "powersgd" else f"{name} gradients"
        )
