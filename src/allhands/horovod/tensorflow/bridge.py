"""TensorFlow's tensors through the engine, eagerly and inside ``tf.function``.

In a graph a collective is two operations. The first hands the tensors over and is stateful, so that
TensorFlow runs those of one graph in the order of the program, none waiting for another. The second
waits for the result and is stateless, so that nothing but
its readers waits with it: gradients are exchanged while later ones are computed, and ranks whose
programs are ordered differently
do not wait for one another in a circle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import tensorflow as tf
import torch

from allhands.errors import AllhandsError, UserError

P = ParamSpec("P")
R = TypeVar("R")

# Takes torch tensors that share TensorFlow's memory and a name (None: the engine counts), and
# returns the engine's handle. Where there are batches it also takes which tensors these are, as
# `batch`.
Submit = Callable[..., Any]

# Results of one place in a graph that may wait to be read: more than iterations of a loop overlap
# in TensorFlow (10). Older ones will never be read, since TensorFlow had no use for them and left
# out the operation that reads.
_KEPT = 16

_BF16 = tf.bfloat16.as_numpy_dtype
_KNOWN = {
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
}
# Moved as they are, these may travel under the signed type of the same width; a sum of them would
# not be one.
_UNSIGNED = {tf.uint16: np.int16, tf.uint32: np.int32, tf.uint64: np.int64}

with warnings.catch_warnings():
    # torch says once in a process that an array is not writable. The engine only reads what it is
    # given.
    warnings.simplefilter("ignore")
    _read_only = np.zeros(1)
    _read_only.flags.writeable = False
    torch.from_numpy(_read_only)


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """Keep AutoGraph from rewriting a function of ours, and its errors from being wrapped where a
    user's code is rewritten."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AllhandsError as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    return cast(Callable[P, R], tf.autograph.experimental.do_not_convert(run))


def exchange(
    submit: Submit,
    tensors: Sequence[Any],
    *,
    kind: str,
    name: str | None,
    shapes: Sequence[Any],
    dtypes: Sequence[Any] | None = None,
    reduces: bool = False,
    ignore_name_scope: bool = False,
    batches: Sequence[Sequence[int]] | None = None,
) -> list[Any]:
    """Run one collective of the engine on TensorFlow tensors, or one for each batch of them.

    Args:
        submit: hands torch tensors to the engine under a name.
        tensors: any number of ``tf.Tensor``, variables or what converts to one.
        kind: what the collective is called where no name is given, such as "allreduce".
        name: of the collective; None: made from the place in the graph, or counted by the engine in
            eager mode.
        shapes: the static shapes of the results.
        dtypes: of the results; None: those of the tensors.
        reduces: whether the collective computes, which unsigned integers of more than 8 bits
            refuse.
        ignore_name_scope: leave out TensorFlow's name scopes.
        batches: which tensors go together, each tensor in one of them, those first that are
            computed first. None: all of them.

    Returns:
        One tensor for each of `shapes`.

    Raises:
        UserError: a dtype cannot be sent, or this is inside a function that XLA compiles.
        HorovodInternalError: eagerly, when the ranks disagree or one is missing; inside
            ``tf.function`` the same message comes in a ``tf.errors.OpError``.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        _check_dtype(tensor.dtype, kind, name, reduces)
    results = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    eager = tf.executing_eagerly()
    if batches is None:
        own = name if eager else _graph_name(kind, name, ignore_name_scope)
        parts = [_Part(submit, own, list(range(len(tensors))), list(range(len(shapes))))]
    else:
        parts = []
        for number, batch in enumerate(batches):
            own = derived(name, str(number))
            own = own if eager else _graph_name(kind, own, ignore_name_scope)
            parts.append(
                _Part(functools.partial(submit, batch=batch), own, list(batch), list(batch))
            )
    if eager:
        return _at_once(parts, tensors, results)
    return _in_graph(parts, tensors, shapes, results)


@dataclass(frozen=True)
class _Part:
    """One collective: which of the tensors it takes, and which of the results it gives."""

    submit: Submit
    name: str | None
    takes: list[int]
    gives: list[int]


def to_torch(array: Any) -> torch.Tensor:
    """A torch tensor on the memory of a NumPy array, or of a copy where it is a scalar."""
    array = np.asarray(array)
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    signed = _UNSIGNED.get(tf.as_dtype(array.dtype))
    return torch.from_numpy(array if signed is None else array.view(signed))


def to_array(tensor: torch.Tensor, dtype: Any) -> Any:
    """A NumPy array of TensorFlow's `dtype` on the memory of a torch tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BF16)
    array = tensor.numpy()
    return array.view(dtype.as_numpy_dtype) if dtype in _UNSIGNED else array


def _arrays(result: Any, dtypes: Sequence[Any]) -> list[Any]:
    return [to_array(tensor, dtype) for tensor, dtype in zip(result, dtypes, strict=True)]


def _check_dtype(dtype: Any, kind: str, name: str | None, reduces: bool) -> None:
    if dtype in _KNOWN or (dtype in _UNSIGNED and not reduces):
        return
    what = f"{kind} of {name!r}" if name else kind
    known = ", ".join(sorted(known.name for known in _KNOWN))
    raise UserError(f"{what}: the tensor is {dtype.name}; cast it to one of {known}")


class _Calls:
    """The collectives of graphs that this process has handed over and not yet read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._open: dict[int, Any] = {}
        self._unread: defaultdict[str, deque[int]] = defaultdict(deque)
        self._last: dict[str, weakref.ref[Any]] = {}

    def start(self, submit: Submit, name: str | None, *arrays: Any) -> Any:
        assert name is not None  # the place in the graph
        known = self._last.get(name)
        before = known() if known is not None else None
        if before is not None and not before.done():
            _settle(before)  # iterations of a loop overlap
        handle = submit([to_torch(array) for array in arrays], name)
        with self._lock:
            self._last[name] = weakref.ref(handle)
            ticket = next(self._tickets)
            self._open[ticket] = handle
            unread = self._unread[name]
            unread.append(ticket)
            if len(unread) > _KEPT:
                self._open.pop(unread.popleft(), None)
        return np.int64(ticket)

    def finish(self, dtypes: list[list[Any]], *tickets: Any) -> list[Any]:
        with self._lock:
            handles = [self._open.pop(int(ticket)) for ticket in tickets]
        return [
            array
            for handle, kinds in zip(handles, dtypes, strict=True)
            for array in _arrays(handle.wait(), kinds)
        ]


_calls = _Calls()


def _settle(handle: Any) -> None:
    try:
        handle.wait()
    except RuntimeError:
        pass  # said to the operation that reads the result


def _at_once(parts: list[_Part], tensors: list[Any], dtypes: list[Any]) -> list[Any]:
    handles = [
        part.submit([to_torch(tensors[i].numpy()) for i in part.takes], part.name) for part in parts
    ]
    results: list[Any] = [None] * len(dtypes)
    for part, handle in zip(parts, handles, strict=True):
        for i, array in zip(
            part.gives, _arrays(handle.wait(), [dtypes[i] for i in part.gives]), strict=True
        ):
            results[i] = tf.constant(array)
    return results


def _in_graph(
    parts: list[_Part], tensors: list[Any], shapes: Sequence[Any], dtypes: list[Any]
) -> list[Any]:
    """An operation that begins for each part, and one that waits for all of them: a thread of
    TensorFlow's that waits computes nothing meanwhile."""
    _refuse_xla(parts[0].name or "")
    ordered = [i for part in parts for i in part.gives]
    kinds = [[dtypes[i] for i in part.gives] for part in parts]
    with tf.name_scope("allhands"):
        tickets = [
            tf.numpy_function(
                functools.partial(_calls.start, part.submit, part.name),
                [tensors[i] for i in part.takes],
                tf.int64,
            )
            for part in parts
        ]
        found = tf.numpy_function(
            functools.partial(_calls.finish, kinds),
            tickets,
            [dtypes[i] for i in ordered],
            stateful=False,
        )
    results: list[Any] = [None] * len(dtypes)
    for i, result in zip(ordered, found, strict=True):
        result.set_shape(shapes[i])
        results[i] = result
    return results


def _graph_name(kind: str, name: str | None, ignore_name_scope: bool) -> str:
    """A name that the same place of the same program has on every rank, however often each one
    traced it."""
    graph = tf.compat.v1.get_default_graph()
    if name is not None:
        with graph.name_scope(None) if ignore_name_scope else contextlib.nullcontext():
            return str(graph.unique_name(name))
    path = [str(graph.unique_name(kind))]
    while graph is not None and hasattr(graph, "outer_graph"):
        # The branches of a condition are functions whose names end in a number that counts over the
        # whole process.
        path.append(re.sub(r"[_\d]+$", "", str(graph.name)))
        graph = graph.outer_graph
    return "/".join(reversed(path))


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


def differentiable(
    tensors: list[Any],
    forward: Callable[..., list[Any]],
    backward: Callable[..., list[Any]],
    with_results: bool = False,
) -> list[Any]:
    """`forward` of the tensors, whose gradient is `backward` of the gradients of its results (after
    the results, if asked)."""

    @tf.custom_gradient
    def run(*parts: Any) -> Any:
        results = forward(*parts)
        return results, functools.partial(backward, results) if with_results else backward

    results = run(*tensors)
    return list(results) if isinstance(results, list | tuple) else [results]


def derived(name: str | None, suffix: str) -> str | None:
    """The name of an exchange that belongs to another."""
    return None if name is None else f"{name}.{suffix}"


def check_device(argument: str, device: Any) -> None:
    """Refuse a device that tensors are not exchanged on."""
    if device and "cpu" not in str(device).lower():
        raise UserError(
            f"{argument}={device!r}: tensors are exchanged through the memory of the host: leave "
            f"{argument} out"
        )
