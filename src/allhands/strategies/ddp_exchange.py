"""The gradients of a model that every worker holds, all-reduced in buckets while the backward pass
runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors, calls, sum_gradients
from allhands.comm.codecs import cast_dtype
from allhands.comm.host_sum import host_sum
from allhands.errors import UserError
from allhands.step.exchange import Exchange
from allhands.strategies.alike import check_weights_equal
from allhands.strategies.base import BindOptions
from allhands.strategies.buckets import CAP_MB, Buckets
from allhands.strategies.compressed import CodedSum, sum_rounded
from allhands.strategies.measured import (
    backward_of,
    candidates_for,
    fastest,
    on_first_samples,
    said,
    without_gradients,
)
from allhands.strategies.powersgd import PowerSGD
from allhands.strategies.sharded_state import ShardedState
from allhands.strategies.shards import KEPT_TWICE
from allhands.world import World


class DDPExchange(Exchange):
    """Sums gradients over several ranks.

    Args:
        model: the same on all ranks.
        optimizer: over its parameters.
        world: the ranks, at least 2.
        cap: size in MB of the buckets; None for PyTorch's, or "measured".
        compress: how gradients travel; None as they are.
        options: of the training.
        sharded: the optimizer's state, where it is dealt out.

    Attributes:
        trained: names and parameters whose gradients are exchanged.
        buckets: in which they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        cap: float | str | None,
        compress: Mapping[str, Any] | None,
        options: BindOptions,
        sharded: ShardedState | None,
    ) -> None:
        self._model, self._world, self._compress = model, world, compress
        self._optimizer, self._groups = optimizer, len(optimizer.param_groups)
        self._seed, self._sharded = options.seed, sharded
        if sharded is not None:
            self.updated_elsewhere = sharded.elsewhere
        self._small = host_sum(world)
        self._measures = cap == "measured"
        self._measure_on = options.try_on
        self._cap = None if isinstance(cap, str) else cap
        self._cap_known = False
        self.notes: list[str] = []
        if sharded is not None and options.may_lose:
            self.notes.append(KEPT_TWICE)
        if options.may_lose and compress is not None and cast_dtype(compress) is None:
            self.notes.append(
                f"--elastic: what a worker has left over of its gradients (compress="
                f"{compress['name']!r}) is lost with it, and the others go on with theirs"
            )
        self.trained = self._exchanged(model)
        self._coded = self._make_coded(self.trained)
        self.buckets: Buckets | None = None
        self._lay_out()

    def _exchanged(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _lay_out(self) -> None:
        """Exchange the gradients of `trained`, in buckets of the size that was chosen."""
        if self.buckets is not None:
            self.buckets.close()
        sparse = _sparse_weights(self._model)
        self._sparse = [parameter for _, parameter in self.trained if id(parameter) in sparse]
        self.buckets = self._make_buckets(self._model, self.trained, self._cap, self._coded)

    def _make_buckets(
        self,
        model: nn.Module,
        trained: list[tuple[str, nn.Parameter]],
        cap_mb: float | None,
        coded: PowerSGD | CodedSum | None,
    ) -> Buckets:
        rounded = cast_dtype(self._compress)
        add_up = coded.add_up if coded is not None else None
        if rounded is not None:
            add_up = lambda bucket: sum_rounded(bucket.flat, rounded)  # noqa: E731
        sparse = _sparse_weights(model)
        dense = [(name, parameter) for name, parameter in trained if id(parameter) not in sparse]
        cap_mb = CAP_MB if cap_mb is None else cap_mb
        return Buckets(dense, self._world, cap_mb, add_up, self._small)

    def _make_coded(
        self, trained: list[tuple[str, nn.Parameter]], start: int | None = None
    ) -> PowerSGD | CodedSum | None:
        """The exchange in a codec with a residual; None where gradients are rounded at most."""
        if self._compress is None or cast_dtype(self._compress) is not None:
            return None
        if self._compress["name"] == "powersgd":
            first = self._compress["start"] if start is None else start
            return PowerSGD(self._compress["rank"], first, self._seed, trained, self._world)
        return CodedSum(self._compress, trained, self._world)

    # ------------------------------------------------------------------ before steps

    def begin(self, step: int) -> None:
        measure_on, self._measure_on = self._measure_on, None
        if not self._measures or self._cap_known:
            return
        assert measure_on is not None
        cap, times = None, {}
        candidates = candidates_for(sum(p.nbytes for _, p in self.trained))
        if len(candidates) > 1:
            cap, times = on_first_samples(
                measure_on,
                lambda call: fastest(lambda size: self._trial(size, call), candidates, self._world),
                self._world.device,
            )
        self._take_cap(cap, said(cap, times))

    def _trial(self, cap_mb: float | None, call: Callable[[nn.Module], Any]) -> Callable[[], None]:
        model = copy.deepcopy(self._model).train()
        trained = self._exchanged(model)
        buckets = self._make_buckets(model, trained, cap_mb, self._make_coded(trained, 0))

        def step() -> None:
            without_gradients(p for _, p in trained)
            backward_of(call(model))
            buckets.finish()

        return step

    def _take_cap(self, cap_mb: float | None, note: str) -> None:
        self._cap, self._cap_known = cap_mb, True
        self.notes.append(note)
        self._lay_out()

    def go_on(self) -> None:
        """Parameters that have been frozen, unfrozen, added or replaced since the last steps are
        exchanged as they are now."""
        if self._sharded is not None and len(self._optimizer.param_groups) != self._groups:
            raise UserError(
                "a group was added to the optimizer, and DDP(optimizer_state='sharded') has dealt "
                "its parameters out; give the optimizer all groups before train(), or write DDP()"
            )
        trained = self._exchanged(self._model)
        if [id(parameter) for _, parameter in trained] != [
            id(parameter) for _, parameter in self.trained
        ]:
            self.trained = trained
            self._lay_out()

    def finish(self, lost: bool = False) -> None:
        assert self.buckets is not None
        self.buckets.close()

    # ------------------------------------------------------------------ a step

    def no_exchange(self) -> AbstractContextManager[None]:
        assert self.buckets is not None
        return self.buckets.kept_back()

    def complete(self, idle: bool, failed: bool) -> None:
        assert self.buckets is not None
        if idle:
            sum_gradients([p for _, p in self.trained], self._world)
            return
        if failed:
            self.buckets.spoil()
            for parameter in self._sparse:
                parameter.grad = torch.full_like(parameter, float("nan"))
        else:
            self.buckets.finish()
        sum_gradients(self._sparse, self._world)

    def updated(self) -> None:
        if self._sharded is not None:
            # also after a change of the optimizer's mode
            calls.note("sharing updated parameters")
            with torch.no_grad():
                for rank, parameters in self._sharded.messages:
                    broadcast_tensors(parameters, self._world, rank)

    def check_equal(self, where: str) -> None:
        check_weights_equal(self._model, [name for name, _ in self.trained], where)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"workers": self._world.world_size}
        if self._cap_known:
            state["bucket_cap_mb"] = self._cap
        if self._coded is not None:
            state[self._coded.name] = self._coded.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._coded is not None and self._coded.name in state:
            self._coded.load_state_dict(state[self._coded.name])
        if state.get("workers", self._world.world_size) != self._world.world_size:
            # with another number of ranks, other sizes of buckets may be the fastest, and sums have
            # other last bits
            return
        if self._measures and "bucket_cap_mb" in state:
            cap = state["bucket_cap_mb"]
            self._take_cap(cap, f"bucket_cap_mb={cap} (measured before the checkpoint)")

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return self._coded.own_tensors() if self._coded is not None else {}

    def load_own_tensors(self, tensors: dict[str, torch.Tensor]) -> bool:
        if self._coded is not None:
            self._coded.load_own_tensors(tensors)
        return self._coded is not None


def _sparse_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse."""
    return {id(module.weight) for module in model.modules() if is_sparse(module)}


def is_sparse(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is sparse."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
