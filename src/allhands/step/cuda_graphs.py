"""CUDA graphs of what a function asks of a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch


class Graphs(Protocol):
    """What a step asks of a device, captured in one part or several."""

    def replay(self) -> None:
        """Do it again, and what was to be done on the host between two parts."""

    def reset(self) -> None:
        """Let go of it, from any thread; a replay then fails."""


#: Captures what a function asks a device to do, without doing it. The function is given what ends
#: one part and begins the next; the second argument is what a replay calls between the two.
Capture = Callable[[Callable[[Callable[[], None]], None], Callable[[], None]], Graphs]


class CudaGraphs:
    """Captures in CUDA graphs that share one pool of memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[_InParts] = weakref.WeakSet()

    def __call__(
        self, function: Callable[[Callable[[], None]], None], between: Callable[[], None]
    ) -> Graphs:
        if not any(graphs.kept for graphs in self._graphs):
            # PyTorch gives a pool up with the last of its graphs.
            self._pool = torch.cuda.graph_pool_handle()
        parts: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as stack:

            def begin() -> None:
                parts.append(torch.cuda.CUDAGraph())
                # Only this thread's calls are looked at: that of nccl, which watches earlier
                # exchanges, may go on asking for their state.
                stack.enter_context(
                    torch.cuda.graph(
                        parts[-1],
                        pool=self._pool,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    )
                )

            def cut() -> None:
                stack.close()
                begin()

            begin()
            function(cut)
        made = _InParts(parts, between)
        self._graphs.add(made)
        return made

    def alongside(self) -> Any:
        """A context in which this stream is the current one, in order with the one before."""
        return _Alongside(self._stream, torch.cuda.current_stream(self._device))


class _InParts:
    def __init__(self, parts: Sequence[torch.cuda.CUDAGraph], between: Callable[[], None]) -> None:
        self._parts, self._between = parts, between
        self.kept = True  # and not reset
        self._lock = threading.Lock()  # another thread resets them at an abort

    def replay(self) -> None:
        for number, part in enumerate(self._parts):
            if number:
                self._between()
            with self._lock:
                part.replay()

    def reset(self) -> None:
        with self._lock:
            self.kept = False
            for part in self._parts:
                part.reset()


class _Alongside:
    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream, self._before = stream, before
        self._on = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(self._before)
        self._on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._on.__exit__(*error)
        self._before.wait_stream(self._stream)
