"""Data parallelism: a whole model on every worker, gradients all-reduced while the backward pass
runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors, sum_gradients
from allhands.comm.codecs import cast_dtype
from allhands.errors import UserError
from allhands.strategies.alike import check_weights_equal, make_buffers_equal
from allhands.strategies.base import Strategy
from allhands.strategies.buckets import CAP_MB, Buckets
from allhands.strategies.compressed import CodedSum, check_compress, check_compressible, sum_rounded
from allhands.strategies.held import Read
from allhands.strategies.measured import (
    backward_of,
    candidates_for,
    check_cap,
    fastest,
    on_training_data,
    said,
    without_gradients,
)
from allhands.strategies.powersgd import PowerSGD
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
    resumes_anywhere = True

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
        self._shards = self.parted = optimizer_state == "sharded"
        self._sharded: ShardedState | None = None

    def check_settings(self, settings: Any) -> None:
        if self._shards:
            check_shardable(settings)

    def check_training(self, settings: Any, workers: int) -> None:
        if self.compress is not None and workers > 1:
            check_compressible(self.compress, settings.model, settings.precision)

    def capture_refused(self, model: nn.Module, world: World) -> str | None:
        if world.world_size == 1:
            return None
        if self.sync_batchnorm:
            return "with several workers DDP(sync_batchnorm=True) decides on the host; write DDP()"
        if self._shards:
            return (
                "DDP(optimizer_state='sharded') shares what each worker has updated, which is "
                "not captured; write DDP()"
            )
        if self.compress is not None and cast_dtype(self.compress) is None:
            name = self.compress["name"]
            return (
                f"DDP(compress={name!r}) keeps on the host what it has left over of gradients; "
                "compress='bf16' does not"
            )
        sparse = next((name for name, module in model.named_modules() if _is_sparse(module)), None)
        return (
            None
            if sparse is None
            else f"'{sparse}' has sparse gradients; make it with sparse=False"
        )

    def check(self, world: World) -> None:
        if self.sync_batchnorm and world.world_size > 1 and world.device.type != "cuda":
            raise UserError(
                "DDP(sync_batchnorm=True) needs GPUs: torch.nn.SyncBatchNorm has no "
                f"{world.device.type} implementation. Write DDP(), which averages BatchNorm "
                "statistics before evaluation and saving, or use GroupNorm"
            )

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world = world
        self._cap: float | None = (
            None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb
        )
        self._cap_known = False
        self.buckets: Buckets | None = None
        self._coded: PowerSGD | CodedSum | None = None
        self._measure_on, self._notes = self.try_on, list[str]()
        if world.world_size > 1 and self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.bare = model
        self.trained = self.exchanged(model)
        if world.world_size == 1:
            return model
        broadcast_tensors(
            [*(parameter.detach() for parameter in model.parameters()), *model.buffers()], world
        )
        self._coded = self._make_coded(self.trained)
        self._lay_out()
        return model

    def exchanged(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose gradients are exchanged, and their names."""
        return [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _lay_out(self) -> None:
        """Exchange the gradients of `trained`, in buckets of the size that was chosen."""
        if self.buckets is not None:
            self.buckets.close()
        sparse = _sparse_weights(self.bare)
        self._sparse = [parameter for _, parameter in self.trained if id(parameter) in sparse]
        self.buckets = self._make_buckets(self.bare, self.trained, self._cap, self._coded)

    def _make_buckets(
        self,
        model: nn.Module,
        trained: list[tuple[str, nn.Parameter]],
        cap_mb: float | None,
        coded: PowerSGD | CodedSum | None,
    ) -> Buckets:
        rounded = cast_dtype(self.compress)
        add_up = coded.add_up if coded is not None else None
        if rounded is not None:
            add_up = lambda bucket: sum_rounded(bucket.flat, rounded)  # noqa: E731
        sparse = _sparse_weights(model)
        dense = [(name, parameter) for name, parameter in trained if id(parameter) not in sparse]
        return Buckets(dense, self.world, CAP_MB if cap_mb is None else cap_mb, add_up)

    def _make_coded(
        self, trained: list[tuple[str, nn.Parameter]], start: int | None = None
    ) -> PowerSGD | CodedSum | None:
        """The exchange in a codec with a residual; None where gradients are rounded at most."""
        if self.compress is None or cast_dtype(self.compress) is not None:
            return None
        if self.compress["name"] == "powersgd":
            first = self.compress["start"] if start is None else start
            return PowerSGD(self.compress["rank"], first, self.seed, trained, self.world)
        return CodedSum(self.compress, trained, self.world)

    def go_on(self) -> None:
        """Parameters that have been frozen, unfrozen, added or replaced since the last steps are
        exchanged as they are now."""
        if self.world.world_size == 1:
            return
        if self._sharded is not None and len(self._optimizer.param_groups) != self._groups:
            raise UserError(
                "a group was added to the optimizer, and DDP(optimizer_state='sharded') has dealt "
                "its parameters out; give the optimizer all groups before train(), or write DDP()"
            )
        trained = self.exchanged(self.bare)
        if [id(parameter) for _, parameter in trained] != [
            id(parameter) for _, parameter in self.trained
        ]:
            self.trained = trained
            self._lay_out()

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        measure_on, self._measure_on = self._measure_on, None
        if self.bucket_cap_mb != "measured" or self.world.world_size == 1 or self._cap_known:
            return
        assert measure_on is not None
        cap, times = None, {}
        candidates = candidates_for(sum(p.nbytes for _, p in self.trained))
        if len(candidates) > 1:
            cap, times = on_training_data(
                measure_on,
                lambda call: fastest(lambda size: self._trial(size, call), candidates, self.world),
                self.world.device,
            )
        self._take_cap(cap, said(cap, times))

    def _trial(self, cap_mb: float | None, call: Callable[[nn.Module], Any]) -> Callable[[], None]:
        """What takes a step on a copy of the model, with buckets of this size."""
        model = copy.deepcopy(self.bare).train()
        trained = self.exchanged(model)
        buckets = self._make_buckets(model, trained, cap_mb, self._make_coded(trained, 0))

        def step() -> None:
            without_gradients(p for _, p in trained)
            backward_of(call(model))
            buckets.finish()

        return step

    def _take_cap(self, cap_mb: float | None, note: str) -> None:
        self._cap, self._cap_known = cap_mb, True
        self._notes.append(note)
        self._lay_out()

    def in_words(self) -> str:
        if self.compress is None:
            return self.name
        name = self.compress["name"]
        return f"{self.name}, " + (
            f"powersgd {self.compress['rank']}" if name == "powersgd" else f"{name} gradients"
        )

    def notes(self) -> list[str]:
        return self._notes

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._groups = optimizer, len(optimizer.param_groups)
        self._sharded = None
        if self._shards and self.world.world_size > 1:
            self._sharded = ShardedState(optimizer, self.bare, self.world)

    def updated(self) -> None:
        if self._sharded is not None:
            self._sharded.share()

    def updated_elsewhere(self) -> Iterable[nn.Parameter]:
        return () if self._sharded is None else self._sharded.elsewhere

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict() if self._sharded is None else self._sharded.state_dict()

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], read: Read
    ) -> None:
        if self._sharded is None:
            optimizer.load_state_dict(dict(state))
        else:
            self._sharded.load_state_dict(state, read)

    def give_back(self, keep: bool) -> None:
        if self._sharded is not None:
            self._sharded.give_back(keep)

    def compiled(self, workers: int) -> str | None:
        return "layers" if workers > 1 else "model"

    def no_exchange(self) -> AbstractContextManager[None]:
        return self.buckets.kept_back() if self.buckets is not None else super().no_exchange()

    def state_dict(self) -> dict[str, Any]:
        if self.world.world_size == 1:
            return {}
        state: dict[str, Any] = {"workers": self.world.world_size}
        if self._cap_known:
            state["bucket_cap_mb"] = self._cap
        if self._coded is not None:
            state[self._coded.name] = self._coded.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.world.world_size == 1:
            return
        if self._coded is not None and self._coded.name in state:
            self._coded.load_state_dict(state[self._coded.name])
        if state.get("workers", self.world.world_size) != self.world.world_size:
            # with another number of ranks, other sizes of buckets may be the fastest, and sums have
            # other last bits
            return
        if self.bucket_cap_mb == "measured" and "bucket_cap_mb" in state:
            cap = state["bucket_cap_mb"]
            self._take_cap(cap, f"bucket_cap_mb={cap} (measured before the checkpoint)")

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return self._coded.own_tensors() if self._coded is not None else {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        if self._coded is not None:
            self._coded.load_own_tensors(tensors)
        return self._coded is not None

    def complete(self, idle: bool, failed: bool) -> None:
        if self.buckets is None:
            return
        if idle:
            sum_gradients([p for _, p in self.trained], self.world)
            return
        if failed:
            self.buckets.spoil()
            for parameter in self._sparse:
                parameter.grad = torch.full_like(parameter, float("nan"))
        else:
            self.buckets.finish()
        sum_gradients(self._sparse, self.world)

    def finish(self) -> None:
        if self.buckets is not None:
            self.buckets.close()

    def sync_buffers(self) -> None:
        if self.world.world_size == 1:
            return
        make_buffers_equal(self.bare, self.world)

    def check_equal(self, where: str) -> None:
        if self.world.world_size == 1:
            return
        check_weights_equal(self.bare, [name for name, _ in self.trained], where)


def _sparse_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse."""
    return {id(module.weight) for module in model.modules() if _is_sparse(module)}


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
