"""What an operation that was begun returns at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allhands.horovod.exceptions import HorovodInternalError


class OnGPU:
    """An operation that is queued on a stream of the engine's.

    Its tensors are held until somebody has waited for it, or it is over: a caller that frees one
    earlier would let the caller's stream write over it. (`record_stream` does the same, at the
    price of an event for each tensor.)

    Args:
        event: a torch.cuda.Event behind its last kernel.
        held: the tensors that it reads and writes.
        is_new: its results were made on the engine's stream.
    """

    def __init__(self, event: torch.cuda.Event, held: Any, is_new: bool) -> None:
        self._event, self._held, self._is_new = event, held, is_new

    def done(self) -> bool:
        """Whether it is over on the GPU."""
        return bool(self._event.query())

    def wait(self, result: Any) -> None:
        """Let the current stream wait for it."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        self._held = None
        if self._is_new:
            for value in result:
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(stream)

    def is_held(self) -> bool:
        """Whether somebody has to keep it."""
        return self._held is not None and not self.done()


class Handle:
    """One operation of this rank. `wait` gives its result as often as it is asked."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.absent: Sequence[int] = ()  # places of tensors that no rank has a value for
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._then: Callable[[], None] | None = None
        self._result: Any = None
        self._error: str | None = None
        self._on_gpu: OnGPU | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set() and (self._on_gpu is None or self._on_gpu.done())

    def wait(self, timeout: float | None = None) -> Any:
        """The result. On a GPU, work that is queued after this call on the current stream sees it.

        Raises:
            HorovodInternalError: the operation failed; the message names it, the ranks and what
                each of them gave.
            TimeoutError: it is not over after `timeout` seconds.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.what} is not over after {timeout:.0f} s")
        if self._error is not None:
            raise HorovodInternalError(self._error)
        if self._on_gpu is not None:
            self._on_gpu.wait(self._result)
        return self._result

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` once `wait` would return or raise on the CPU: now, or in the engine's
        thread."""
        with self._lock:
            if not self._over.is_set():
                self._then = then
                return
        then()

    def finish(self, result: Any, on_gpu: OnGPU | None = None) -> None:
        """Called by the engine."""
        self._result, self._on_gpu = result, on_gpu
        self._end()

    def fail(self, error: str) -> None:
        """Called by the engine."""
        self._error = error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._over.set()
            then, self._then = self._then, None
        if then is not None:
            then()
