"""Exchanges inside ``tf.function``, in which no thread of TensorFlow's waits for other ranks.

In a graph an exchange is a chain of operations. The first ones hand the tensors over and are
stateful, so that TensorFlow runs those of one graph in the order of the program. Then a token is
taken out of a queue, in which a thread of ours puts it when the engine is done; TensorFlow waits
for a queue without one of its threads. The last one reads the results. What follows the first ones
is stateless for TensorFlow, so that nothing but its readers waits with it: gradients are exchanged
while later ones are computed, and ranks whose programs are ordered differently do not wait for one
another in a circle, however few threads TensorFlow has.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from allhands.errors import UserError
from allhands.horovod.handles import Handle
from allhands.horovod.tensorflow.conversions import to_arrays, to_torch

# Takes torch tensors that share TensorFlow's memory and a name (None: the engine counts), and
# returns the engine's handle. Where there are batches it also takes which tensors these are, as
# `batch`.
Submit = Callable[..., Handle]

# Results of one place in a graph that may wait to be read: more than iterations of a loop overlap
# in TensorFlow (10). Older ones will never be read, since TensorFlow had no use for them and left
# out the operations that wait and read.
KEPT = 16


@dataclass(frozen=True)
class GraphPart:
    """One collective: which of the tensors it takes, and which of the results it gives."""

    submit: Submit
    name: str | None
    takes: list[int]
    gives: list[int]


def exchange_in_graph(
    parts: list[GraphPart], tensors: list[Any], shapes: Sequence[Any], dtypes: list[Any]
) -> list[Any]:
    """Build the operations of one exchange: `bridge.exchange` in a graph."""
    _refuse_xla(parts[0].name or "")
    place = GraphPlace(parts, [[dtypes[i] for i in part.gives] for part in parts])
    with tf.name_scope("allhands"):
        ticket: Any = tf.constant(-1, tf.int64)
        for number, part in enumerate(parts):
            start = functools.partial(place.start, number)
            ticket = tf.numpy_function(start, [ticket, *(tensors[i] for i in part.takes)], tf.int64)
        ticket.set_shape([])
        found = tf.numpy_function(
            place.read,
            [ticket, *place.wait(ticket)],
            [kind for kinds in place.kinds for kind in kinds],
            stateful=False,
        )
    results: list[Any] = [None] * len(dtypes)
    for i, result in zip([i for part in parts for i in part.gives], found, strict=True):
        result.set_shape(shapes[i])
        results[i] = result
    return results


class GraphPlace:
    """One place in a graph where tensors are exchanged. TensorFlow may come there again before the
    results of the last times are read.

    Attributes:
        kinds: the dtypes of the results, for each part.
    """

    def __init__(self, parts: list[GraphPart], kinds: list[list[Any]]) -> None:
        self._parts, self.kinds = parts, kinds
        self._lock = threading.Lock()
        self._times = 0
        self._open: dict[int, list[_GraphCall]] = {}  # of each time, until it is read
        self._unread: set[int] = set()  # queues with a token that nobody has waited for
        self._queues: list[Any] = []
        with tf.init_scope():
            # A session of TensorFlow 1 has queues of its own; there the reading operation waits.
            if tf.executing_eagerly():
                with tf.device("CPU:0"):
                    for _ in range(KEPT):
                        self._queues.append(tf.queue.FIFOQueue(-1, [tf.int64], [()]))
                    self._all = tf.stack([each.queue_ref for each in self._queues])

    def start(self, number: int, ticket: Any, *arrays: Any) -> Any:
        """Hand a part's tensors over. Returns the ticket, which the first part makes."""
        part = self._parts[number]
        assert part.name is not None  # the place in the graph
        with self._lock:
            if number == 0:
                ticket = np.int64(self._times)
                self._times += 1
                self._open[int(ticket)] = []
                if self._open.pop(int(ticket) - KEPT, None) is not None:
                    self._unread.add(int(ticket) % KEPT)
            call = _GraphCall(part.submit, [to_torch(array) for array in arrays], part.name)
            self._open[int(ticket)].append(call)
        call.when_over(functools.partial(self._tell, int(ticket)))
        _by_name.add(call)
        return ticket

    def wait(self, ticket: Any) -> list[Any]:
        """What becomes a tensor when all parts of this time are over."""
        if not self._queues:
            return []
        with tf.device("CPU:0"):
            one = tf.gather(self._all, ticket % KEPT)
            # Called so, what it does is none of the things that TensorFlow runs in their order.
            return list(tf.raw_ops.PartitionedCall(args=[one], Tout=[tf.int64], f=_take()))

    def read(self, ticket: Any, *_: Any) -> list[Any]:
        """The results of this time."""
        with self._lock:
            calls = self._open.pop(int(ticket))
        return [
            array
            for call, kinds in zip(calls, self.kinds, strict=True)
            for array in to_arrays(call.result(), kinds)
        ]

    def _tell(self, ticket: int) -> None:
        with self._lock:
            calls = self._open.get(ticket, [])
            if len(calls) < len(self._parts) or not all(call.is_over() for call in calls):
                return
            unread = ticket % KEPT in self._unread
            self._unread.discard(ticket % KEPT)
        if self._queues:
            chosen = self._queues[ticket % KEPT]
            while unread and chosen.size():
                chosen.dequeue()
            tf.raw_ops.QueueEnqueueV2(handle=chosen.queue_ref, components=[_token()])


@functools.cache
def _take() -> Any:
    def take(chosen: Any) -> Any:
        return tf.raw_ops.QueueDequeueV2(handle=chosen, component_types=[tf.int64])[0]

    with tf.init_scope():
        handle = tf.TensorSpec([], tf.resource)
        return tf.function(take, input_signature=[handle], autograph=False).get_concrete_function()


@functools.cache
def _token() -> Any:
    with tf.device("CPU:0"):
        return tf.constant(0, tf.int64)


class _GraphCall:
    """An operation that is handed over by a graph, and begun when the last one of its name is
    over."""

    def __init__(self, submit: Submit, tensors: list[torch.Tensor], name: str) -> None:
        self.name = name
        self._begin = functools.partial(submit, tensors, name)
        self._handle: Handle | None = None
        self._error: Exception | None = None
        self._over = threading.Event()
        self._then: Callable[[], None] | None = None

    def when_over(self, then: Callable[[], None]) -> None:
        """`then` is to be called after it is over."""
        self._then = then

    def begin(self) -> None:
        """Give it to the engine; what that refuses is raised by `result`."""
        try:
            self._handle = self._begin()
        except Exception as error:
            self._error = error
            _by_name.over.put(self)
        else:
            self._handle.when_over(functools.partial(_by_name.over.put, self))

    def end(self) -> None:
        """It is over."""
        self._over.set()
        if self._then is not None:
            self._then()

    def is_over(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._over.is_set()

    def result(self) -> Any:
        """What the engine gives."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        return self._handle.wait()


class _ByName:
    """The calls of all graphs that are not over: those of one name run one after another, since
    iterations of a loop overlap.

    Attributes:
        over: calls that the engine is done with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, deque[_GraphCall]] = defaultdict(deque)
        self._thread: threading.Thread | None = None
        self.over: queue.SimpleQueue[_GraphCall] = queue.SimpleQueue()

    def add(self, call: _GraphCall) -> None:
        """Begin it, now or when those before it are over."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="allhands-horovod-tensorflow", daemon=True
                )
                self._thread.start()
            waiting = self._waiting[call.name]
            waiting.append(call)
            first = len(waiting) == 1
        if first:
            call.begin()

    def _run(self) -> None:
        # Not the engine's thread: what waits for a token must never run in it.
        while True:
            call = self.over.get()
            with self._lock:
                waiting = self._waiting[call.name]
                waiting.popleft()
                following = waiting[0] if waiting else None
                if following is None:
                    del self._waiting[call.name]
            if following is not None:
                following.begin()
            call.end()


_by_name = _ByName()


def _refuse_xla(name: str) -> None:
    """XLA cannot call Python, and would say so in words that nobody connects with us."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = (
            frame.f_locals.get("self") if frame.f_code.co_name in {"_call", "__call__"} else None
        )
        if (
            owner is not None
            and getattr(owner, "_jit_compile", None) is True
            and hasattr(owner, "python_function")
        ):
            raise UserError(
                f"{name}: an exchange between processes cannot be part of a function that XLA "
                "compiles: set jit_compile=False (in tf.function, or in model.compile)"
            )
        frame = frame.f_back
