"""Seconds of a single operation on a GPU, without the host's, and what it takes of its memory
meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

# Calls of a graph, graphs that are replayed, and calls before.
_CALLS, _TURNS, _WARM = 8, 3, 2
# Calls that take longer than this are not repeated as often.
_LONG_S = 0.05

Call = Callable[[], Any]


def seconds_on_gpu(call: Call, device: torch.device, captured: bool = True) -> float:
    """Of an operation among others that keep the GPU busy, the median of a few.

    Args:
        call: asks for it.
        device: where it is computed.
        captured: calls are captured in a CUDA graph where that can be done, so that a short
            operation takes no longer than the GPU does.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            call()
        count = 1 if _between(call, stream) > _LONG_S else _CALLS
        several = _repeated(call, count)
        if captured:
            several = _replaying(several, stream) or several
        return statistics.median(_between(several, stream) / count for _ in range(_TURNS))


def workspace_of(call: Call, device: torch.device) -> int:
    """Bytes that an operation takes while it is computed, beside what it gives."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return torch.cuda.max_memory_allocated(device) - before - kept


def call_on_gpu(name: str, args: Any, kwargs: Any) -> Call | None:
    """What a GPU computes in the place of an operation of processors; None where it is the same.

    Args:
        name: of the operation.
        args, kwargs: its arguments, with tensors on the GPU.
    """
    kind = name.removeprefix("aten.").removesuffix(".default")
    if kind == "_scaled_dot_product_flash_attention_for_cpu":
        q, k, v, dropout, causal = args[:5]
        return lambda: _attention(q, k, v, dropout, causal)
    if kind == "_scaled_dot_product_flash_attention_for_cpu_backward":
        gradient, *inputs = args[:4]
        dropout, causal = args[6:8]
        return _backward(lambda q, k, v: _attention(q, k, v, dropout, causal), inputs, gradient)
    if kind == "native_batch_norm":
        given, weight, bias, mean, variance, training, momentum, eps = args
        return lambda: F.batch_norm(given, mean, variance, weight, bias, training, momentum, eps)
    if kind == "native_batch_norm_backward":
        gradient, given, weight, mean, variance, _, _, training, eps, _ = args
        return _backward(
            lambda x, w, b: F.batch_norm(x, mean, variance, w, b, training, 0.1, eps),
            (given, weight, torch.zeros_like(weight)),
            gradient,
        )
    return None


def largest_number(name: str, shapes: list[tuple[int, ...]], args: Any) -> int:
    """Below which whole numbers lie that an operation is given: rows of an embedding are read at
    many places, and not at one."""
    if name == "aten.embedding.default":
        return shapes[0][0]
    if name == "aten.embedding_dense_backward.default":
        return int(args[2])
    return 1


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)


def _backward(forward: Callable[..., Any], inputs: Any, gradient: torch.Tensor) -> Call:
    leaves = [one.detach().requires_grad_() for one in inputs]
    with torch.enable_grad():
        output = forward(*leaves)
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


def _repeated(call: Call, count: int) -> Call:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def _replaying(call: Call, stream: torch.cuda.Stream) -> Call | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
    except RuntimeError:  # it waits for the GPU
        return None
    graph.replay()
    return graph.replay


def _between(call: Call, stream: torch.cuda.Stream) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(stream)
    call()
    ended.record(stream)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
