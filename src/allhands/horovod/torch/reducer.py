"""Gradients travel while the backward pass still runs.

Parameters are dealt to buckets in the reverse of their order, as their gradients come. A bucket
whose gradients are all there is given to the engine as one operation, under a name of its own; the
engine's thread reduces it while the backward pass goes on.

Once some steps have sent all buckets in the usual way, they are promised as one round (see
`rounds`) when the first gradient of a step comes. By the time a bucket is full the ranks have
agreed, and it leaves at once, from the thread that filled it. One that was full before leaves from
the engine's thread: this one may be waiting for something else by then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from allhands.horovod import engine
from allhands.horovod.exceptions import CallOrderError, HorovodInternalError
from allhands.horovod.lanes import Lane, Round
from allhands.horovod.process_sets import ProcessSet
from allhands.horovod.promise_rounds import Parts
from allhands.horovod.reduce_ops import ADDITIVE, Average, ReduceOp, Sum
from allhands.horovod.torch.compression import Compression
from allhands.horovod.torch.optimizer_buckets import Flat, OptimizerBucket, grouped, of_one_sort
from allhands.horovod.torch.reductions import sparse_allreduce_async

# So many steps in a row that sent all buckets in the usual way come before the first that is
# promised.
_STEADY = 3


class Reducer:
    """The gradients of some parameters.

    Args:
        named: (name, parameter), the same on all ranks.
        compression: one of `Compression`.
        passes: how many backward passes add up in ``.grad`` before it is reduced.
        op: `Average`, `Sum` or `ActiveAverage`, or another reduction.
        predivide: what gradients are divided by before they are added up, and multiplied by after
            it.
        groups: how many groups to make; or lists of parameters, each a group that is reduced as a
            whole; None makes buckets.
        sparse_as_dense: sparse gradients become dense before they travel.
        process_set: the ranks.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        compression: Any,
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._passes = passes
        self._names: dict[torch.nn.Parameter, str] = {}
        self._buckets: list[OptimizerBucket] = []
        self.synchronized = False
        self._engine: engine.Engine | None = None  # that of the steps that are counted
        self._steady = 0
        self._parts: Parts = ()
        self._begun = False
        self._lane: Lane | None = None
        self._round: Round | None = None  # that is promised
        self._next = 0  # the bucket that comes next in it
        self._lock = threading.Lock()  # of the round: the engine's thread takes part
        #: Whether this rank is one of the ranks; else its gradients stay its own.
        self._takes_part = process_set.included()
        self._add(list(named), groups)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """More parameters, between two steps."""
        self._add(list(named), None)

    def _add(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
    ) -> None:
        if not self._takes_part:
            return
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._names.update({param: name for name, param in trained})
        params = [param for _, param in trained]
        for members in of_one_sort(grouped(params, groups)):
            # In messages its first tensor's name says which it is; that the number alone matches
            # must not be enough.
            bucket = OptimizerBucket(
                f"gradients.{len(self._buckets)}.{self._names[members[0]]}", members
            )
            self._buckets.append(bucket)
            bucket.renew(self._passes)
            for place, param in enumerate(members):
                param.register_post_accumulate_grad_hook(
                    functools.partial(self._on_gradient, bucket, place)
                )
        self._steady, self._parts = 0, ()

    @property
    def passes(self) -> int:
        """How many backward passes a step has."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self.busy():
            raise CallOrderError(
                "the number of backward passes was changed between backward() and step(); change "
                "it after step()"
            )
        self._passes = passes
        self.reset()

    def busy(self) -> bool:
        """Whether gradients are on their way."""
        return self._round is not None or any(bucket.sent for bucket in self._buckets)

    def _on_gradient(self, bucket: OptimizerBucket, place: int, param: torch.nn.Parameter) -> None:
        self.synchronized = False
        left = bucket.left[place] - 1
        if left < 0 or bucket.sent:
            raise CallOrderError(
                f"{self._names[param]!r}: gradients were computed more than {self._passes} times "
                "(backward_passes_per_step) before step(); set backward_passes_per_step to the "
                "number of backward passes of a step"
            )
        bucket.left[place] = left
        if left == 0:
            bucket.waiting -= 1
            try:
                if not self._begun:
                    self._begin()
                if not bucket.waiting:
                    self._send(bucket)
            except HorovodInternalError:
                self.reset()  # so that an elastic training can go on
                raise

    # ------------------------------------------------------------------ bucket by bucket

    def _send(self, bucket: OptimizerBucket) -> None:
        bucket.sent = True
        if self._round is None:
            return self._ask(bucket)
        gradients = [param.grad for param in bucket.params]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            bucket.made_dense = True
            gradients = [_dense(gradient) for gradient in gradients]
        flat = self._pack(bucket, bucket.params, gradients)
        with torch.no_grad():
            bucket.narrow, bucket.context = self._compression.compress(flat.marked)
        with self._lock:
            bucket.packed = True
            promised = self._round
            if promised is None:  # declined meanwhile
                return self._ask_packed(bucket)
            if promised.answer is None and flat.marked.is_cuda:
                bucket.ready = torch.cuda.Event()
                bucket.ready.record()
            return self._leave(promised)

    def _ask(self, bucket: OptimizerBucket) -> None:
        """Give a bucket to the engine, by its name."""
        params = bucket.params
        gradients = [param.grad for param in params]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            params = self._send_sparse(bucket)
            gradients = [_dense(param.grad) for param in params]
        if not params:
            return
        flat = self._pack(bucket, params, gradients)
        with torch.no_grad():
            bucket.narrow, bucket.context = self._compression.compress(flat.whole)
        assert bucket.narrow is not None
        self._begin_by_name(bucket)

    def _begin_by_name(self, bucket: OptimizerBucket) -> None:
        flat, narrow = bucket.flat, bucket.narrow
        assert flat is not None
        assert narrow is not None
        running = engine.current()
        is_usual = bucket.was_usual
        ask = bucket.usual_ask if is_usual else None
        if ask is None:
            names = [self._names[param] for param in flat.params]
            ask = running.ask_allreduce(
                flat.cut(narrow),
                self._op,
                1 / self._predivide,
                self._predivide,
                self._process_set,
                names,
                bucket.absent,
            )
            bucket.usual_ask = ask if is_usual else bucket.usual_ask
        bucket.handle = running.begin(bucket.name, ask, self._process_set, [narrow], [narrow])

    def _pack(
        self,
        bucket: OptimizerBucket,
        params: list[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
    ) -> Flat:
        """Put the gradients together."""
        if params is bucket.params:
            flat = bucket.usual = bucket.usual or Flat(params)
        else:
            flat = Flat(params)
        bucket.flat = flat
        bucket.absent = [place for place, gradient in enumerate(gradients) if gradient is None]
        marks = flat.all_there
        with torch.no_grad():
            if bucket.absent:
                flat.whole.zero_()
                marks = marks.index_fill(0, torch.tensor(bucket.absent, device=marks.device), 0)
            pairs = [
                (view, own)
                for view, own in zip(flat.views, gradients, strict=True)
                if own is not None
            ]
            torch._foreach_copy_(
                [*(view for view, _ in pairs), flat.marks], [*(own for _, own in pairs), marks]
            )
        return flat

    def _send_sparse(self, bucket: OptimizerBucket) -> list[torch.nn.Parameter]:
        left = []
        for param in bucket.params:
            gradient = param.grad
            if gradient is None or not gradient.is_sparse:
                left.append(param)
            elif self._sparse_as_dense:
                bucket.made_dense = True
                left.append(param)
            else:
                op = Sum if self._op is Sum else Average
                name = f"gradients.sparse.{self._names[param]}"
                bucket.sparse.append(
                    (param, sparse_allreduce_async(gradient, name, op, self._process_set))
                )
        return left if bucket.sparse else bucket.params

    # ------------------------------------------------------------------ as a round

    def _begin(self) -> None:
        """The first gradient of a step is there; the others will come, or are known to be absent at
        its end."""
        self._begun = True
        running = engine.current()
        if running is not self._engine:
            self._engine, self._steady = running, 0
        for bucket in self._buckets:
            if bucket.usual is not None and not bucket.usual.fits():
                bucket.usual, bucket.usual_ask = None, None
                self._steady, self._parts = 0, ()
        if self._steady < _STEADY:
            return
        lane = running.lane(self._process_set)
        if lane is None:
            return
        if not self._parts:
            number = self._process_set.process_set_id or 0
            asks = [(bucket, bucket.usual_ask) for bucket in self._buckets]
            self._parts = tuple(
                ((number, "allreduce", bucket.name), ask) for bucket, ask in asks if ask is not None
            )
        self._lane, self._next = lane, 0
        self._round = lane.promise(self._parts, self._answered)

    def _answered(self, promised: Round) -> None:
        """Called by the engine's thread."""
        with self._lock:
            self._leave(promised)

    def _leave(self, promised: Round) -> None:
        """Begin to reduce the buckets of the round that are full, in its order, once the ranks have
        agreed."""
        lane, running = self._lane, self._engine
        if (
            promised is not self._round
            or promised.answer is None
            or lane is None
            or running is None
        ):
            return
        if not promised.answer:
            self._round = None
            for bucket in self._buckets:
                if bucket.packed:
                    self._ask_packed(bucket)
            return
        while self._next < len(self._buckets) and self._buckets[self._next].packed:
            bucket = self._buckets[self._next]
            assert bucket.flat is not None
            assert bucket.narrow is not None
            if bucket.ready is not None:
                torch.cuda.current_stream().wait_event(bucket.ready)
            with torch.no_grad():
                if self._predivide != 1.0:
                    bucket.narrow[: bucket.flat.length].mul_(1 / self._predivide)
                lane.begin(bucket.narrow, promised)
            running.timeline.began_round(self._parts[self._next][0])
            self._next += 1
            if self._next == len(self._buckets):
                lane.kept()

    def _ask_packed(self, bucket: OptimizerBucket) -> None:
        """Give a bucket that was made for a round to the engine, by its name."""
        flat, narrow = bucket.flat, bucket.narrow
        assert flat is not None
        assert narrow is not None
        bucket.narrow = flat.whole if narrow is flat.marked else narrow[: flat.length]
        if bucket.ready is not None:
            torch.cuda.current_stream().wait_event(bucket.ready)
        self._begin_by_name(bucket)

    def _end_round(self, lane: Lane, promised: Round) -> None:
        divisor = 1 if self._op is Sum else self._process_set.size()
        on_gpu = self._buckets[0].params[0].is_cuda
        # On a GPU nothing waits here, and few kernels for all are better; on the CPU the next
        # bucket still travels.
        places = list(range(len(self._buckets)))
        for together in [places] if on_gpu else [[place] for place in places]:
            buckets = [self._buckets[place] for place in together]
            for place in together:
                lane.end(promised, place, buckets[0].params[0].device)
            with torch.no_grad():
                reduced = [bucket.narrow for bucket in buckets if bucket.narrow is not None]
                if divisor > 1:
                    torch._foreach_div_(reduced, divisor)
                if self._predivide != 1.0:
                    torch._foreach_mul_(reduced, self._predivide)
            self._unpack_round(buckets)
        assert self._engine is not None
        self._engine.timeline.ended([key for key, _ in self._parts])

    def _unpack_round(self, buckets: list[OptimizerBucket]) -> None:
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for bucket in buckets:
            flat = bucket.flat
            assert flat is not None
            whole = self._compression.decompress(bucket.narrow, bucket.context)
            views = flat.views if whole is flat.marked else flat.cut(whole[: flat.length])
            if bucket.was_usual:
                into += [param.grad for param in flat.params]  # type: ignore[misc]
                values += views
                continue
            marks = whole[flat.length :].tolist() if bucket.absent else ()
            for place, (param, view) in enumerate(zip(flat.params, views, strict=True)):
                gradient = param.grad
                if gradient is None:
                    if marks[place] != 0:  # some rank has it
                        param.grad = view.clone()
                elif gradient.is_sparse:
                    param.grad = view.to_sparse(gradient.sparse_dim())
                else:
                    into.append(gradient)
                    values.append(view)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, values)

    # ------------------------------------------------------------------ the end of a step

    def synchronize(self) -> None:
        """Send what has not been, and wait for all. A parameter without a gradient on any rank
        keeps None."""
        if not self._takes_part:
            self.synchronized = True
            return
        usual = False
        try:
            if not self._begun:
                self._begin()
            for bucket in self._buckets:
                if not bucket.sent:
                    self._send(bucket)
            with self._lock:  # the engine's thread may be asking for what was declined
                promised, lane = self._round, self._lane
            if promised is not None and lane is not None:
                agreed = promised.wait()
                lane.check()
                with self._lock:
                    self._leave(promised)  # what is left, if this comes before the engine's thread
                if agreed:
                    self._end_round(lane, promised)
            for bucket in self._buckets:
                if bucket.handle is not None:
                    bucket.handle.wait()
                    self._unpack(bucket, bucket.handle.absent)
                for param, pending in bucket.sparse:
                    param.grad = pending.wait()
            usual = all(bucket.was_usual for bucket in self._buckets)
        finally:
            self._steady = self._steady + 1 if usual and self._can_promise() else 0
            self.reset()
        self.synchronized = True

    def _can_promise(self) -> bool:
        known = (Compression.none, Compression.fp16, Compression.bf16)
        if self._op not in ADDITIVE or self._compression not in known:
            return False
        # Hooks of two devices run in two threads.
        return len({bucket.params[0].device for bucket in self._buckets}) == 1

    def _unpack(self, bucket: OptimizerBucket, absent: Sequence[int]) -> None:
        flat = bucket.flat
        assert flat is not None
        whole = self._compression.decompress(bucket.narrow, bucket.context)
        views = flat.views if whole is flat.whole else flat.cut(whole)
        with torch.no_grad():
            present = [param.grad for param in flat.params if param.grad is not None]
            if len(present) == len(views) and not bucket.made_dense:
                torch._foreach_copy_(present, views)
                return
            for place, (param, view) in enumerate(zip(flat.params, views, strict=True)):
                if place in absent:
                    continue
                if param.grad is None:
                    param.grad = view.clone()
                elif param.grad.is_sparse:
                    param.grad = view.to_sparse(param.grad.sparse_dim())
                else:
                    param.grad.copy_(view)

    def reset(self) -> None:
        """Begin a new step."""
        if self._round is not None:
            self._round.works.clear()
        self._begun, self._round = False, None
        for bucket in self._buckets:
            bucket.renew(self._passes)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or not gradient.is_sparse else gradient.to_dense()
