"""What the ``_async`` functions return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from allhands.horovod.handles import Handle

_Args = ParamSpec("_Args")


class AsyncResult:
    """What the ``_async`` functions return: an engine's handle and what its result becomes."""

    def __init__(self, handle: Handle, finish: Callable[[Any], Any]) -> None:
        self.handle, self._finish = handle, finish

    def wait(self) -> Any:
        """The operation's result; see `synchronize`."""
        return self._finish(self.handle.wait())

    #: Horovod gives a function for sparse tensors.
    __call__ = wait


def poll(handle: AsyncResult) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.handle.done()


def synchronize(handle: AsyncResult) -> Any:
    """Wait for an operation that was begun, and return its result.

    Raises:
        HorovodInternalError: it failed; the message names the tensor, the ranks and what each of
            them gave.
    """
    return handle.wait()


def only(values: list[torch.Tensor]) -> torch.Tensor:
    """The result of one tensor's operation."""
    return values[0]


def same(values: Any) -> Any:
    """A group's result."""
    return values


def waited(name: str, begin: Callable[_Args, AsyncResult]) -> Callable[_Args, Any]:
    """The function of this name that begins an operation as `begin` does, and returns its result
    once it is over."""

    @functools.wraps(begin)
    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> Any:
        return begin(*args, **kwargs).wait()

    run.__name__ = run.__qualname__ = name
    return run
