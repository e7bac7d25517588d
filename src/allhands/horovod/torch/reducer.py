"""Gradients travel while the backward pass still runs.

Parameters are dealt to buckets in the reverse of their order, as their gradients come. A bucket whose gradients are all there is
given to the engine as one operation, under a name of its own; the engine's thread reduces it while the backward pass goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allhands.errors import UserError
from allhands.horovod import engine
from allhands.horovod.checks import Ask
from allhands.horovod.handles import Handle
from allhands.horovod.process_sets import ProcessSet
from allhands.horovod.reduce_ops import Average, ReduceOp, Sum
from allhands.horovod.torch.ops import Pending, sparse_allreduce_async

# As torch's DistributedDataParallel has them: the first one is small, so that it leaves early.
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20


@dataclass
class _Bucket:
    name: str
    params: list[torch.nn.Parameter]
    left: list[int] = field(default_factory=list)  # backward passes of this step that each has yet to see
    waiting: int = 0  # how many have one left
    sent: bool = False
    handle: Handle | None = None
    # What travels: each parameter, what the engine writes into, and what its gradient is made of it with.
    parts: list[tuple[torch.nn.Parameter, torch.Tensor, Any]] = field(default_factory=list)
    sparse: list[tuple[torch.nn.Parameter, Pending]] = field(default_factory=list)
    usual: Ask | None = None  # what is asked for when all of its gradients are there and dense


class Reducer:
    """The gradients of some parameters.

    Args:
        named: (name, parameter), the same on all ranks.
        compression: one of `Compression`.
        passes: how many backward passes add up in ``.grad`` before it is reduced.
        op: `Average`, `Sum` or `ActiveAverage`, or another reduction.
        predivide: what gradients are divided by before they are added up, and multiplied by after it.
        groups: how many groups to make; or lists of parameters, each a group that is reduced as a whole; None makes buckets.
        sparse_as_dense: sparse gradients become dense before they travel.
        process_set: the ranks.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], compression: Any, passes: int, op: ReduceOp, predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None, sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._passes = passes
        self._names: dict[torch.nn.Parameter, str] = {}
        self._buckets: list[_Bucket] = []
        self.synchronized = False
        self._add(list(named), groups)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """More parameters, between two steps."""
        self._add(list(named), None)

    def _add(self, named: list[tuple[str, torch.nn.Parameter]], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._names.update({param: name for name, param in trained})
        params = [param for _, param in trained]
        for members in _grouped(params, groups):
            # In messages its first tensor's name says which it is; that the number alone matches must not be enough.
            bucket = _Bucket(f"gradients.{len(self._buckets)}.{self._names[members[0]]}", members)
            self._buckets.append(bucket)
            self._renew(bucket)
            for place, param in enumerate(members):
                param.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, bucket, place))

    @property
    def passes(self) -> int:
        """How many backward passes a step has."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self.busy():
            raise UserError("the number of backward passes was changed between backward() and step(); change it after step()")
        self._passes = passes
        self.reset()

    def busy(self) -> bool:
        """Whether gradients are on their way."""
        return any(bucket.sent for bucket in self._buckets)

    def _on_gradient(self, bucket: _Bucket, place: int, param: torch.nn.Parameter) -> None:
        self.synchronized = False
        left = bucket.left[place] - 1
        if left < 0 or bucket.sent:
            raise UserError(
                f"{self._names[param]!r}: gradients were computed more than {self._passes} times (backward_passes_per_step) "
                "before step(); set backward_passes_per_step to the number of backward passes of a step"
            )
        bucket.left[place] = left
        if left == 0:
            bucket.waiting -= 1
            if not bucket.waiting:
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        bucket.sent = True
        values: list[torch.Tensor] = []
        absent: list[int] = []
        for param in bucket.params:
            gradient = param.grad
            if gradient is not None and gradient.is_sparse:
                if not self._sparse_as_dense:
                    op = Sum if self._op is Sum else Average
                    name = f"gradients.sparse.{self._names[param]}"
                    bucket.sparse.append((param, sparse_allreduce_async(gradient, name, op, self._process_set)))
                    continue
                gradient = param.grad = gradient.to_dense()
            if gradient is None:
                absent.append(len(values))
                gradient = torch.zeros_like(param, memory_format=torch.contiguous_format, requires_grad=False)
            narrow, context = self._compression.compress(gradient.contiguous())
            values.append(narrow)
            bucket.parts.append((param, narrow, context))
        if not values:
            return
        running = engine.current()
        is_usual = not absent and not bucket.sparse
        ask = bucket.usual if is_usual else None
        if ask is None:
            names = [self._names[param] for param, _, _ in bucket.parts]
            ask = running.ask_allreduce(
                values, self._op, 1 / self._predivide, self._predivide, self._process_set, names, absent
            )  # fmt: skip
            bucket.usual = ask if is_usual else bucket.usual
        bucket.handle = running.begin(bucket.name, ask, self._process_set, values, values)

    def synchronize(self) -> None:
        """Send what has not been, and wait for all. A parameter without a gradient on any rank keeps None."""
        try:
            for bucket in self._buckets:
                if not bucket.sent:
                    self._send(bucket)
            for bucket in self._buckets:
                if bucket.handle is not None:
                    for (param, _, context), value in zip(bucket.parts, bucket.handle.wait(), strict=True):
                        if value is not None:
                            self._write(param, self._compression.decompress(value, context))
                for param, pending in bucket.sparse:
                    param.grad = pending.wait()
        finally:
            self.reset()
        self.synchronized = True

    @staticmethod
    def _write(param: torch.nn.Parameter, value: torch.Tensor) -> None:
        if value is param.grad:
            return
        if param.grad is None or param.grad.is_sparse:
            param.grad = value
        elif param.grad.data_ptr() != value.data_ptr() or not param.grad.is_contiguous():
            param.grad.copy_(value)

    def reset(self) -> None:
        """Begin a new step."""
        for bucket in self._buckets:
            self._renew(bucket)

    def _renew(self, bucket: _Bucket) -> None:
        bucket.left, bucket.waiting = [self._passes] * len(bucket.params), len(bucket.params)
        bucket.sent, bucket.handle = False, None
        bucket.parts, bucket.sparse = [], []


def _grouped(
    params: list[torch.nn.Parameter], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.nn.Parameter]]:
    if isinstance(groups, int):
        count = min(groups, len(params))
        sizes = [len(params) // count + (number < len(params) % count) for number in range(count)]
        rest, made = params[::-1], []
        for size in sizes:
            made.append(rest[:size])
            rest = rest[size:]
        return made
    made = []
    if groups is not None:
        known = set(params)
        made = [[param for param in group if param in known] for group in groups]  # type: ignore[misc]
        grouped = {param for group in made for param in group}
        params = [param for param in params if param not in grouped]
    buckets: list[list[torch.nn.Parameter]] = []
    held: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    longest = min(_BUCKET, engine.current().settings.fusion_threshold)
    limit = min(_FIRST_BUCKET, longest)
    for param in reversed(params):
        key = (param.dtype, param.device)
        group = held.setdefault(key, [])
        size = sum(other.numel() * other.element_size() for other in group)
        if group and size + param.numel() * param.element_size() > limit:
            buckets.append(held[key])
            held[key] = []
            limit = longest
        held[key].append(param)
    return [group for group in [*made, *buckets, *held.values()] if group]
