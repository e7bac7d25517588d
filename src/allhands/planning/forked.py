"""Calls of a function in several processes, which have all that this one has."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_function: Callable[[Any], Any] | None = None


def in_forked(
    function: Callable[[Argument], Result], arguments: Sequence[Argument], processes: int
) -> list[Result]:
    """What a function gives for each argument, with so many processes at once.

    The first is computed here, so that what it imports is there for the others. A function and its
    arguments may be anything; a result is pickled.

    Args:
        processes: 1 computes all here, and so does a process that has used a GPU, which cannot be
            forked.
    """
    count = min(processes, len(arguments) - 1)
    if count < 2 or torch.cuda.is_initialized() or not hasattr(signal, "pthread_sigmask"):
        return [function(one) for one in arguments]
    first = function(arguments[0])
    numbers = range(1, len(arguments))
    with ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(lambda number: function(arguments[number]),),
    ) as pool:
        return [first, *pool.map(_call, numbers)]


def _begin(function: Callable[[int], Any]) -> None:
    global _function
    _function = function
    torch.set_num_threads(1)  # the threads of the parent are not there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them


def _call(number: int) -> Any:
    assert _function is not None
    return _function(number)
