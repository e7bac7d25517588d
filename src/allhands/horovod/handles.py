"""What an operation that was begun returns at once."""

from __future__ import annotations

import threading
from typing import Any

from allhands.horovod.exceptions import HorovodInternalError


class Handle:
    """One operation of this rank. `wait` gives its result as often as it is asked."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._over = threading.Event()
        self._result: Any = None
        self._error: str | None = None
        self._on_gpu: Any = None  # a torch.cuda.Event behind the operation's last kernel

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set() and (self._on_gpu is None or bool(self._on_gpu.query()))

    def wait(self, timeout: float | None = None) -> Any:
        """The result. On a GPU, work that is queued after this call on the current stream sees it.

        Raises:
            HorovodInternalError: the operation failed; the message names it, the ranks and what each of them gave.
            TimeoutError: it is not over after `timeout` seconds.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.what} is not over after {timeout:.0f} s")
        if self._error is not None:
            raise HorovodInternalError(self._error)
        if self._on_gpu is not None:
            import torch

            stream = torch.cuda.current_stream()
            stream.wait_event(self._on_gpu)
            for value in self._result if isinstance(self._result, list | tuple) else [self._result]:
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(stream)
        return self._result

    def finish(self, result: Any, on_gpu: Any = None) -> None:
        """Called by the engine."""
        self._result, self._on_gpu = result, on_gpu
        self._over.set()

    def fail(self, error: str) -> None:
        """Called by the engine."""
        self._error = error
        self._over.set()
