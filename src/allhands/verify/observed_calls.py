"""What the user's code calls in a loop that can make its result depend on the number of workers."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from allhands.comm.log import users_line

# Functions and methods that draw from the global generator where they are given none. Dropout is
# not among them: a run without it tells more.
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "geometric_"),
    "log_normal_",
}
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather"),
    *("gather_object", "scatter", "scatter_object_list", "all_to_all", "all_to_all_single"),
    *("send", "recv"),
)


# Of the modules numpy.random and random, whose functions draw from a generator of the process.
_PROCESS_DRAWS = {
    np.random: (
        *("rand", "randn", "randint", "random", "random_sample", "normal", "uniform", "choice"),
        *("permutation", "shuffle", "beta", "binomial", "exponential", "standard_normal"),
    ),
    random: (
        *("random", "randint", "randrange", "uniform", "choice", "choices", "sample", "shuffle"),
        *("gauss", "normalvariate", "betavariate", "expovariate"),
    ),
}


class ObservedCalls(TorchFunctionMode):
    """Notes draws from the global generators of torch, numpy and random, and collectives, that code
    of the user's makes between `begin` and `end`.

    To be made before the script imports its functions from torch.distributed.

    Attributes:
        draws, collectives: ``function (file:line in function)``, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[str] = []
        self.collectives: list[str] = []
        self._observes = 0
        for name in _COLLECTIVES:
            setattr(dist, name, self._noted(dist, name, self.collectives))
        for module, names in _PROCESS_DRAWS.items():
            for name in names:
                setattr(module, name, self._noted(module, name, self.draws))

    def begin(self) -> None:
        """The training begins."""
        if not self._observes:
            self._observes = 1
            self.__enter__()

    def end(self) -> None:
        """The training has ended."""
        if self._observes:
            self._observes = 0
            self.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is noted."""
        before, self._observes = self._observes, 0
        try:
            yield
        finally:
            self._observes = before

    def paused_in(self, epoch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same reading of a loader, whose samples are seeded each for itself, unobserved."""

        def wrapped(*args: Any) -> Iterator[Any]:
            steps = epoch(*args)
            while True:
                with self.paused():
                    step = next(steps, None)
                if step is None:
                    return
                yield step

        return wrapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._observes and name in _DRAWS and kwargs.get("generator") is None:
            _add(self.draws, f"torch.{name}" if hasattr(torch, name) else f"Tensor.{name}")
        return func(*args, **kwargs)

    def _noted(self, module: ModuleType, name: str, calls: list[str]) -> Callable[..., Any]:
        original = getattr(module, name)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            # Code of ours, and of torch's, calls these too.
            if self._observes and users_line(frame).startswith(f"{frame.f_code.co_filename}:"):
                _add(calls, f"{module.__name__}.{name}")
            return original(*args, **options)

        return call


def _add(calls: list[str], name: str) -> None:
    file, _, rest = users_line(sys._getframe(2)).rpartition(":")
    call = f"{name} ({os.path.basename(file)}:{rest})"
    if call not in calls:
        calls.append(call)
