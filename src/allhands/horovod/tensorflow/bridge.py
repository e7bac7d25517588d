"""TensorFlow's tensors through the engine, eagerly and inside ``tf.function`` (see `graphs`)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import tensorflow as tf

from allhands.errors import AllhandsError, UserError
from allhands.horovod.tensorflow.conversions import check_dtype, to_arrays, to_torch
from allhands.horovod.tensorflow.graphs import GraphPart, Submit, exchange_in_graph

P = ParamSpec("P")
R = TypeVar("R")


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
        check_dtype(tensor.dtype, kind, name, reduces)
    results = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
    eager = tf.executing_eagerly()
    if batches is None:
        own = name if eager else _graph_name(kind, name, ignore_name_scope)
        parts = [GraphPart(submit, own, list(range(len(tensors))), list(range(len(shapes))))]
    else:
        parts = []
        for number, batch in enumerate(batches):
            own = derived(name, str(number))
            own = own if eager else _graph_name(kind, own, ignore_name_scope)
            parts.append(
                GraphPart(functools.partial(submit, batch=batch), own, list(batch), list(batch))
            )
    if eager:
        return _at_once(parts, tensors, results)
    return exchange_in_graph(parts, tensors, shapes, results)


def _at_once(parts: list[GraphPart], tensors: list[Any], dtypes: list[Any]) -> list[Any]:
    handles = [
        part.submit([to_torch(tensors[i].numpy()) for i in part.takes], part.name) for part in parts
    ]
    results: list[Any] = [None] * len(dtypes)
    for part, handle in zip(parts, handles, strict=True):
        for i, array in zip(
            part.gives, to_arrays(handle.wait(), [dtypes[i] for i in part.gives]), strict=True
        ):
            results[i] = tf.constant(array)
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
    if device and "cpu" not in str(device).lower():
        raise UserError(
            f"{argument}={device!r}: tensors are exchanged through the memory of the host: leave "
            f"{argument} out"
        )
