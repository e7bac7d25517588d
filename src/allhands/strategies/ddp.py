"""Data parallelism: a whole model on every worker, gradients all-reduced while the backward pass runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allhands.comm import broadcast_tensors, sum_gradients
from allhands.errors import UserError
from allhands.strategies.alike import check_weights_equal, make_buffers_equal
from allhands.strategies.base import Strategy
from allhands.strategies.buckets import CAP_MB, Buckets
from allhands.strategies.compressed import check_compress, check_compressible, mean_in_bf16, sum_in_bf16
from allhands.strategies.ddp_wrapper import InOrder, explained, took_no_part, wrap
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

    Stands on torch.nn.parallel.DistributedDataParallel; where steps are recorded in CUDA graphs (``step=``), on buckets of its
    own, which give the same sums. Initial weights and buffers are rank 0's. BatchNorm uses each rank's own batch in training,
    unless `sync_batchnorm` is set; its running statistics are averaged over the ranks before evaluation and saving, other
    buffers are rank 0's.

    Args:
        find_unused_parameters: allow parameters that take no part in some step. Costs a walk over the graph each step.
        sync_batchnorm: compute BatchNorm statistics over all ranks (torch.nn.SyncBatchNorm; needs GPUs).
        bucket_cap_mb: size in MB of the buckets in which gradients travel; None keeps PyTorch's default of 25, the
            first of 1. "measured" takes the one of a few sizes with which a step on the first samples is the fastest, and prints
            it; a resumed training keeps it.
        static_graph: promise that the same parameters are used in every step, which lets PyTorch save work.
        check_weights_every: compare the ranks' weights every so many optimizer steps (and at the end of each epoch);
            0 never compares.
        compress: "bf16": gradients travel in bf16 and are added up in fp32. "powersgd": of each gradient matrix two thin factors
            travel, and what they do not hold is added to the next step's gradient (Vogels et al., NeurIPS 2019). Neither computes
            what one process does (`exact` is False). None sends gradients as they are. A step in which some worker has no sample
            is exchanged as it is.
        powersgd_rank: rank of the approximation of a gradient; None takes 1.
        powersgd_start: so many steps are exchanged as they are first; None takes 10.
        optimizer_state: "sharded": each worker keeps the optimizer's state of about 1/N of the parameters, updates those, and
            sends them to the others (ZeRO's first stage, Rajbhandari et al., SC 2020), to the same bits. "whole": each keeps all.

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
        compress: str | None = None,
        powersgd_rank: int | None = None,
        powersgd_start: int | None = None,
        optimizer_state: str = "whole",
    ) -> None:
        check_state(optimizer_state)
        check_cap(bucket_cap_mb)
        check_compress(compress, powersgd_rank, powersgd_start, find_unused_parameters)
        self.find_unused_parameters = find_unused_parameters
        self.sync_batchnorm = sync_batchnorm
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph
        self.check_weights_every = check_weights_every
        self.compress, self.powersgd_rank = compress, powersgd_rank or 1
        self.powersgd_start = 10 if powersgd_start is None else powersgd_start
        if compress is not None:
            self.exact = False
        self._shards = optimizer_state == "sharded"
        self._sharded: ShardedState | None = None

    def check_settings(self, settings: Any) -> None:
        if self._shards:
            check_shardable(settings)

    def check_training(self, settings: Any, workers: int) -> None:
        if self.compress is not None and workers > 1:
            check_compressible(self.compress, settings.model, settings.precision)

    def recording_refused(self, model: nn.Module, world: World) -> str | None:
        if world.world_size == 1:
            return None
        for name in ("find_unused_parameters", "static_graph", "sync_batchnorm"):
            if getattr(self, name):
                return f"with several workers DDP({name}=True) decides on the host; write DDP()"
        if self._shards:
            return "DDP(optimizer_state='sharded') shares what each worker has updated, which is not recorded; write DDP()"
        if self.compress == "powersgd":
            return "DDP(compress='powersgd') decides on the host which steps it compresses; compress='bf16' does not"
        sparse = next((name for name, module in model.named_modules() if _is_sparse(module)), None)
        return None if sparse is None else f"'{sparse}' has sparse gradients; make it with sparse=False"

    def check(self, world: World) -> None:
        if self.sync_batchnorm and world.world_size > 1 and world.device.type != "cuda":
            raise UserError(
                f"DDP(sync_batchnorm=True) needs GPUs: torch.nn.SyncBatchNorm has no {world.device.type} implementation. Write "
                "DDP(), which averages BatchNorm statistics before evaluation and saving, or use GroupNorm"
            )

    def prepare(self, model: nn.Module, world: World) -> nn.Module:
        self.world = world
        self._order: list[str] = []
        self._hooks: list[Any] = []
        self._exchanged = self._called = self._cap_known = False
        self.buckets: Buckets | None = None
        self._powersgd: PowerSGD | None = None
        self._measure_on, self._notes = self.try_on, list[str]()
        if world.world_size == 1:
            self.bare, self.wrapped = model, model
            return model
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.bare = model
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        broadcast_tensors(list(model.buffers()), world)
        if self.records:
            broadcast_tensors([parameter.detach() for parameter in model.parameters()], world)
        if self.compress == "powersgd":
            self._powersgd = self._make_powersgd(self.trained)
        self._lay_out(None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb)
        if self.buckets is None:
            self._watch_order()
        return self.wrapped

    def _lay_out(self, cap_mb: float | None, into: nn.Module | None = None) -> None:
        """Exchange gradients in buckets of this size; `into` is the wrapper that the training has already."""
        if self.records:
            if self.buckets is not None:
                self.buckets.close()
            self.buckets = self._make_buckets(self.trained, cap_mb)
            self.wrapped = self.bare
            return
        self.wrapped = self._wrap(self.bare, cap_mb, self._powersgd, into)
        self._called_hook = self.wrapped.register_forward_pre_hook(self._note_call)

    def _make_buckets(self, trained: list[tuple[str, nn.Parameter]], cap_mb: float | None) -> Buckets:
        add_up = sum_in_bf16 if self.compress == "bf16" else None
        return Buckets([p for _, p in trained], self.world, CAP_MB if cap_mb is None else cap_mb, add_up)

    def _make_powersgd(self, trained: list[tuple[str, nn.Parameter]], start: int | None = None) -> PowerSGD:
        return PowerSGD(
            self.powersgd_rank, self.powersgd_start if start is None else start, self.seed, trained, self.world
        )  # fmt: skip

    def _wrap(self, model: nn.Module, cap_mb: float | None, powersgd: PowerSGD | None,
              into: nn.Module | None = None) -> DistributedDataParallel:  # fmt: skip
        mean = powersgd.mean if powersgd is not None else mean_in_bf16 if self.compress == "bf16" else None
        return wrap(
            model, self.world.device, cap_mb, mean, into, find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )  # fmt: skip

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        measure_on, self._measure_on = self._measure_on, None
        if self.bucket_cap_mb != "measured" or self.world.world_size == 1 or self._cap_known:
            return
        assert measure_on is not None
        cap, times = None, {}
        candidates = candidates_for(sum(p.nbytes for _, p in self.trained))
        if len(candidates) > 1:
            cap, times = on_training_data(
                measure_on, lambda call: fastest(lambda size: self._trial(size, call), candidates, self.world), self.world.device
            )
        self._take_cap(cap, said(cap, times))

    def _trial(self, cap_mb: float | None, call: Callable[[nn.Module], Any]) -> Callable[[], None]:
        """What takes a step on a copy of the model, with buckets of this size."""
        model = copy.deepcopy(self.bare).train()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets = self._make_buckets(trained, cap_mb) if self.records else None
        powersgd = self._make_powersgd(trained, 0) if self._powersgd is not None else None
        module = model if buckets is not None else self._wrap(model, cap_mb, powersgd)

        def step() -> None:
            without_gradients(p for _, p in trained)
            backward_of(call(module))
            if buckets is not None:
                buckets.finish()

        return step

    def _take_cap(self, cap_mb: float | None, note: str) -> None:
        self._cap, self._cap_known = cap_mb, True
        self._notes.append(note)
        self._lay_out(cap_mb, self.wrapped)

    def in_words(self) -> str:
        if self.compress is None:
            return self.name
        return f"{self.name}, " + ("bf16 gradients" if self.compress == "bf16" else f"powersgd {self.powersgd_rank}")

    def notes(self) -> list[str]:
        return self._notes

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self._sharded = None
        if self._shards and self.world.world_size > 1:
            self._sharded = ShardedState(optimizer, self.bare, self.world)

    def updated(self) -> None:
        if self._sharded is not None:
            self._sharded.share()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict() if self._sharded is None else self._sharded.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], read: Read) -> None:
        if self._sharded is None:
            optimizer.load_state_dict(dict(state))
        else:
            self._sharded.load_state_dict(state, read)

    def give_back(self, keep: bool) -> None:
        if self._sharded is not None:
            self._sharded.give_back(keep)

    def compiled(self, workers: int) -> str | None:
        return "layers" if workers > 1 else "model"

    def gradient_scale(self, world: World) -> float:
        return 1.0 if self.buckets is not None else float(world.world_size)  # DistributedDataParallel divides by it

    def no_exchange(self) -> AbstractContextManager[None]:
        if self.world.world_size == 1:
            return super().no_exchange()
        if self.buckets is not None:
            return self.buckets.kept_back()
        if self.static_graph and not self._exchanged:
            raise UserError(
                "DDP(static_graph=True) must exchange gradients in its first micro-batch, which is not so with accumulate above "
                "1, or when the first step leaves a rank without a sample. Write DDP() instead"
            )
        return self.wrapped.no_sync()  # type: ignore[operator]

    def exchange_missing(self) -> None:
        if self.world.world_size == 1:
            return
        parameters = [p for _, p in self.trained]
        if self.buckets is not None:
            sum_gradients(parameters, self.world)
            return
        # In the forward pass after the first exchange, PyTorch lays its buckets out anew, which is a collective. A rank that has
        # no forward pass in this step joins it here; for the others this does nothing.
        self.wrapped.reducer._rebuild_buckets()  # type: ignore[union-attr, operator]
        sum_gradients(parameters, self.world)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.world.world_size)

    def _watch_order(self) -> None:
        """Remember in which order the first step's gradients become ready.

        PyTorch lays its buckets out anew by that order. Where in a bucket a gradient lies decides in which order three or more
        ranks add it up, and so its last bit; a resumed training must begin with the same layout.
        """
        if self.world.world_size > 2 and not self.find_unused_parameters and not self.static_graph:
            for name, parameter in self.trained:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._order.append(name))
                self._hooks.append(hook)

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._order = self._order[-len(self.trained) :]  # earlier ones are of micro-batches that were not exchanged

    def state_dict(self) -> dict[str, Any]:
        if self.world.world_size == 1:
            return {}
        state: dict[str, Any] = {"workers": self.world.world_size}
        if self.buckets is None:
            state["order"] = list(self._order)
        if self._cap_known:
            state["bucket_cap_mb"] = self._cap
        if self._powersgd is not None:
            state["powersgd"] = self._powersgd.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.world.world_size == 1:
            return
        if self._powersgd is not None and "powersgd" in state:
            self._powersgd.load_state_dict(state["powersgd"])
        if state.get("workers", self.world.world_size) != self.world.world_size:
            return  # with another number of ranks, other sizes of buckets may be the fastest, and sums have other last bits
        if self.bucket_cap_mb == "measured" and "bucket_cap_mb" in state:
            cap = state["bucket_cap_mb"]
            self._take_cap(cap, f"bucket_cap_mb={cap} (measured before the checkpoint)")
        by_name = dict(self.trained)
        order = state.get("order") or []
        if not self._hooks or sorted(order) != sorted(by_name):
            return
        self._stop_watching()
        self._order = list(order)
        if self._powersgd is not None:
            self._powersgd.passing = True
        self._backward_alone([by_name[name] for name in order], 0.0)
        if self._powersgd is not None:
            self._powersgd.passing = False
        self._called = False
        for parameter in by_name.values():
            parameter.grad = None

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return self._powersgd.own_tensors() if self._powersgd is not None else {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        if self._powersgd is not None:
            self._powersgd.load_own_tensors(tensors)
        return self._powersgd is not None

    def spoil(self) -> None:
        if self.buckets is not None:
            self.buckets.spoil()
        elif self.world.world_size > 1:
            self._backward_alone([parameter for _, parameter in self.trained], float("nan"))

    def _backward_alone(self, parameters: list[nn.Parameter], gradient: float) -> None:
        """A backward pass over the bare parameters, which makes them ready in this order with this gradient."""
        sparse = {id(module.weight) for module in self.bare.modules() if _is_sparse(module)}
        self.wrapped.module = InOrder(parameters, gradient, sparse)
        try:
            self.wrapped().backward()
        finally:
            self.wrapped.module = self.bare

    def check_gradients(self) -> None:
        if self.world.world_size == 1:
            return
        if self.buckets is not None:
            missing = {id(parameter) for parameter in self.buckets.finish()}
            if missing:
                raise took_no_part([(name, p) for name, p in self.trained if id(p) in missing], self.world.rank)
            return
        if not self._exchanged:
            self._after_first_exchange()
        if self._hooks:
            self._stop_watching()
        try:
            self.wrapped._check_reducer_finalized()  # type: ignore[operator]
        except RuntimeError as error:
            raise explained(error, self.trained, self.world.rank) from None

    def _note_call(self, *_: Any) -> None:
        self._called = True

    def _after_first_exchange(self) -> None:
        self._exchanged = True
        self._called_hook.remove()
        if not self._called:
            raise UserError(
                f"on rank {self.world.rank} the first step did not call the model that handle_batch is given, but something "
                "inside it (model.module, or a method of it), so no gradients were exchanged. Call model(…) itself; what else "
                "must run goes into its forward()"
            )

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


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
