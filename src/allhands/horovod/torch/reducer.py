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


class _Flat:
    """Memory for some gradients, one after another, and a view of each."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.whole = torch.empty(sum(param.numel() for param in params), dtype=params[0].dtype, device=params[0].device)
        self.views = self.cut(self.whole)

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of memory of the same length."""
        pieces = whole.split([param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]


@dataclass
class _Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

    name: str
    params: list[torch.nn.Parameter]
    left: list[int] = field(default_factory=list)  # backward passes of this step that each has yet to see
    waiting: int = 0  # how many have one left
    sent: bool = False
    handle: Handle | None = None
    flat: _Flat | None = None  # of what was sent
    narrow: torch.Tensor | None = None  # what travels, and what the flat memory is made of it with
    context: Any = None
    sparse: list[tuple[torch.nn.Parameter, Pending]] = field(default_factory=list)
    # Of the usual case, in which all gradients are there and dense: made once.
    usual: _Flat | None = None
    usual_ask: Ask | None = None


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
        for members in _of_one_sort(_grouped(params, groups)):
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
        params = bucket.params
        gradients = [param.grad for param in params]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            params = self._send_sparse(bucket)
            gradients = [param.grad for param in params]
        if not params:
            return
        if params is bucket.params:
            flat = bucket.usual = bucket.usual or _Flat(params)
        else:
            flat = _Flat(params)
        absent = [place for place, gradient in enumerate(gradients) if gradient is None]
        with torch.no_grad():
            if absent:
                flat.whole.zero_()
            pairs = [(view, own) for view, own in zip(flat.views, gradients, strict=True) if own is not None]
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [own for _, own in pairs])
            bucket.narrow, bucket.context = self._compression.compress(flat.whole)
        assert bucket.narrow is not None
        running = engine.current()
        is_usual = flat is bucket.usual and not absent
        ask = bucket.usual_ask if is_usual else None
        if ask is None:
            names = [self._names[param] for param in params]
            ask = running.ask_allreduce(
                flat.cut(bucket.narrow), self._op, 1 / self._predivide, self._predivide, self._process_set, names, absent
            )
            bucket.usual_ask = ask if is_usual else bucket.usual_ask
        bucket.flat = flat
        bucket.handle = running.begin(bucket.name, ask, self._process_set, [bucket.narrow], [bucket.narrow])

    def _send_sparse(self, bucket: _Bucket) -> list[torch.nn.Parameter]:
        """Send the sparse gradients, or make them dense; returns the parameters that are left."""
        left = []
        for param in bucket.params:
            gradient = param.grad
            if gradient is None or not gradient.is_sparse:
                left.append(param)
            elif self._sparse_as_dense:
                param.grad = gradient.to_dense()
                left.append(param)
            else:
                op = Sum if self._op is Sum else Average
                name = f"gradients.sparse.{self._names[param]}"
                bucket.sparse.append((param, sparse_allreduce_async(gradient, name, op, self._process_set)))
        return left if bucket.sparse else bucket.params

    def synchronize(self) -> None:
        """Send what has not been, and wait for all. A parameter without a gradient on any rank keeps None."""
        try:
            for bucket in self._buckets:
                if not bucket.sent:
                    self._send(bucket)
            for bucket in self._buckets:
                if bucket.handle is not None:
                    bucket.handle.wait()
                    self._unpack(bucket, bucket.handle.absent)
                for param, pending in bucket.sparse:
                    param.grad = pending.wait()
        finally:
            self.reset()
        self.synchronized = True

    def _unpack(self, bucket: _Bucket, absent: Sequence[int]) -> None:
        flat = bucket.flat
        assert flat is not None
        whole = self._compression.decompress(bucket.narrow, bucket.context)
        views = flat.views if whole is flat.whole else flat.cut(whole)
        gradients = [param.grad for param in flat.params]
        with torch.no_grad():
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) == len(views):
                torch._foreach_copy_(present, views)
                return
            for place, (param, view) in enumerate(zip(flat.params, views, strict=True)):
                if place in absent:
                    continue
                if param.grad is None:
                    param.grad = view.clone()
                else:
                    param.grad.copy_(view)

    def reset(self) -> None:
        """Begin a new step."""
        for bucket in self._buckets:
            self._renew(bucket)

    def _renew(self, bucket: _Bucket) -> None:
        bucket.left, bucket.waiting = [self._passes] * len(bucket.params), len(bucket.params)
        bucket.sent, bucket.handle, bucket.flat, bucket.narrow = False, None, None, None
        bucket.sparse = []


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


def _of_one_sort(groups: list[list[torch.nn.Parameter]]) -> list[list[torch.nn.Parameter]]:
    found = []
    for group in groups:
        sorts: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for param in group:
            sorts.setdefault((param.dtype, param.device), []).append(param)
        found += list(sorts.values())
    return found
