"""Data parallelism: a whole model on every worker, gradients all-reduced while the backward pass runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allhands.comm import broadcast_tensors, sum_gradients
from allhands.errors import UserError
from allhands.strategies.alike import check_weights_equal, make_buffers_equal
from allhands.strategies.base import Strategy
from allhands.strategies.buckets import CAP_MB, Buckets
from allhands.world import World

# Buffers are made equal when it matters (sync_buffers); a broadcast in every forward pass would let rank 0's BatchNorm
# statistics overwrite those of the others. PyTorch 2.13 renamed the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS_IN_FORWARD: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class DDP(Strategy):
    """The model on every worker, 1/N of each global batch, gradients all-reduced every step.

    Stands on torch.nn.parallel.DistributedDataParallel; where steps are recorded in CUDA graphs (``step=``), on buckets of its
    own, which give the same sums. Initial weights and buffers are rank 0's. BatchNorm uses each rank's own batch in training,
    unless `sync_batchnorm` is set; its running statistics are averaged over the ranks before evaluation and saving, other
    buffers are rank 0's.

    Args:
        find_unused_parameters: allow parameters that take no part in some step. Costs a walk over the graph each step.
        sync_batchnorm: compute BatchNorm statistics over all ranks (torch.nn.SyncBatchNorm; needs GPUs).
        bucket_cap_mb: size in MB of the buckets in which gradients travel; None keeps PyTorch's default of 25.
        static_graph: promise that the same parameters are used in every step, which lets PyTorch save work.
        check_weights_every: compare the ranks' weights every so many optimizer steps (and at the end of each epoch);
            0 never compares.
    """

    name = "ddp"

    def __init__(
        self,
        find_unused_parameters: bool = False,
        sync_batchnorm: bool = False,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
        check_weights_every: int = 1000,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.sync_batchnorm = sync_batchnorm
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph
        self.check_weights_every = check_weights_every

    def recording_refused(self, model: nn.Module, world: World) -> str | None:
        if world.world_size == 1:
            return None
        for name in ("find_unused_parameters", "static_graph", "sync_batchnorm"):
            if getattr(self, name):
                return f"with several workers DDP({name}=True) decides on the host; write DDP()"
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
        self._exchanged = self._called = False
        self.buckets: Buckets | None = None
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
            self.buckets = Buckets([p for _, p in self.trained], world, self.bucket_cap_mb or CAP_MB)
            self.wrapped = model
            return model
        options: dict[str, Any] = {}
        if self.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = self.bucket_cap_mb
        with _without_buffers(model):
            self.wrapped = DistributedDataParallel(
                model,
                device_ids=[world.device.index] if world.device.type == "cuda" else None,
                **_NO_BUFFERS_IN_FORWARD,
                find_unused_parameters=self.find_unused_parameters,
                static_graph=self.static_graph,
                gradient_as_bucket_view=True,
                **options,
            )
        self._called_hook = self.wrapped.register_forward_pre_hook(self._note_call)
        self._watch_order()
        return self.wrapped

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
        return {"order": list(self._order)} if self.world.world_size > 1 and self.buckets is None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        by_name = dict(self.trained) if self.world.world_size > 1 else {}
        order = state.get("order") or []
        if not self._hooks or sorted(order) != sorted(by_name):
            return
        self._stop_watching()
        self._order = list(order)
        self._backward_alone([by_name[name] for name in order], 0.0)
        self._called = False
        for parameter in by_name.values():
            parameter.grad = None

    def spoil(self) -> None:
        if self.buckets is not None:
            self.buckets.spoil()
        elif self.world.world_size > 1:
            self._backward_alone([parameter for _, parameter in self.trained], float("nan"))

    def _backward_alone(self, parameters: list[nn.Parameter], gradient: float) -> None:
        """A backward pass over the bare parameters, which makes them ready in this order with this gradient."""
        sparse = {id(module.weight) for module in self.bare.modules() if _is_sparse(module)}
        self.wrapped.module = _InOrder(parameters, gradient, sparse)
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
                raise self._took_no_part([(name, p) for name, p in self.trained if id(p) in missing])
            return
        if not self._exchanged:
            self._after_first_exchange()
        if self._hooks:
            self._stop_watching()
        try:
            self.wrapped._check_reducer_finalized()  # type: ignore[operator]
        except RuntimeError as error:
            raise self._unused(error) from None

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

    def _unused(self, error: RuntimeError) -> Exception:
        """What to say when PyTorch has not finished the exchange; its own message gives numbers instead of names."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if found is None:
            return error
        return self._took_no_part([self.trained[int(number)] for number in found[1].split()])

    def _took_no_part(self, unused: list[tuple[str, nn.Parameter]]) -> UserError:
        names = [name for name, _ in unused]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if any(not parameter.requires_grad for _, parameter in unused):
            return UserError(
                f"these parameters were frozen (requires_grad=False) after the training had begun: {shown}. Freeze them before "
                "train(), or write distributed=DDP(find_unused_parameters=True)"
            )
        return UserError(
            f"on rank {self.world.rank} these parameters took no part in the loss (with accumulate: in that of the last "
            f"micro-batch), so their gradients (and others exchanged with them) were not reduced: {shown}. Remove them from the "
            "model, set requires_grad=False, or write distributed=DDP(find_unused_parameters=True)"
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


@contextmanager
def _without_buffers(model: nn.Module) -> Iterator[None]:
    """Within, DistributedDataParallel leaves buffers out: it cannot send those of some dtypes (int16, complex) over gloo."""
    name = "_ddp_params_and_buffers_to_ignore"  # PyTorch's; read once, when the wrapper is made
    before = getattr(model, name, None)
    setattr(model, name, [*(before or ()), *(buffer for buffer, _ in model.named_buffers())])
    try:
        yield
    finally:
        if before is None:
            delattr(model, name)
        else:
            setattr(model, name, before)


class _InOrder(nn.Module):
    """Adds its parameters up, times a number, so that their gradients become ready in the given order.

    Those whose id is in `sparse` get sparse gradients, of their first row.
    """

    def __init__(self, parameters: list[nn.Parameter], gradient: float, sparse: set[int]) -> None:
        super().__init__()
        self.gradient = gradient
        self.sparse = sparse
        self.ordered = parameters  # a plain list: they are not this module's own

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device=self.ordered[0].device)
        # The autograd engine goes back through the last operation first.
        for parameter in reversed(self.ordered):
            value: torch.Tensor = parameter
            if id(parameter) in self.sparse:
                first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                value = nn.functional.embedding(first, parameter, sparse=True)
            total = total + (value * self.gradient).sum()
        return total
