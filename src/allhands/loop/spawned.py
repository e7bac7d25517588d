"""A function of the user's in workers that are started for it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from allhands.errors import UserError, kind_of
from allhands.launch import handback
from allhands.loop.lifecycle import TrainingStopped
from allhands.loop.reporter import Reporter
from allhands.loop.workers import plan
from allhands.world import World

# A rank reads its share of them alone.
_DATA = (Dataset, DataLoader, Sampler)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int | None = None,
    device: str | None = None,
) -> Any:
    """Call a function that trains with an `allhands.Loop` in new processes that form one world.

    From a script or a notebook; nothing needs an ``if __name__ == "__main__"``. What rank 0 has
    changed in the arguments, and in objects that the function uses by name, is changed here
    afterwards: a model holds its trained weights.

    Args:
        fn: what every worker calls.
        args: its arguments.
        workers: how many; None takes one a GPU, or one a core without GPUs.
        device: "cpu" or "cuda"; None takes GPUs where there are some.

    Returns:
        What rank 0 returns: None, numbers, strings, tensors, numpy arrays, and lists, tuples, dicts
        and sets of them.

    Raises:
        UserError: `fn` is no function, or there are fewer GPUs than workers.
        WorkerError: a worker failed; the message holds its traceback.
    """
    if not callable(fn):
        raise UserError(f"spawn({kind_of(fn)}): pass a function, and its arguments as args=(…)")
    return plan(True, workers, device).run(
        call, None, (fn, tuple(args)), preload=["rich.console"], hands_back=True
    )


def call(
    _: None,
    given: tuple[Callable[..., Any], tuple[Any, ...]],
    world: World,
    reporter: Reporter,
    shipped: bool,
) -> Any:
    """Call a function with its arguments on a rank; `given` are the two. What rank 0 has changed in
    them is handed back."""
    fn, args = given
    if shipped:
        for value in args:
            if isinstance(value, nn.Module):
                handback.remember(value)
    result = None
    try:
        result = fn(*args)
    except TrainingStopped as stopped:
        if stopped.signal != signal.SIGINT:
            raise
        # Ctrl-C: what was trained is handed back.
    if shipped and world.local_rank == 0:
        roots = {f"args[{number}]": value for number, value in enumerate(args)} | {"function": fn}
        lost = handback.write(roots, lambda value: isinstance(value, _DATA))
        if lost:
            reporter.line(f"note: not handed back, and as it was before: {'; '.join(lost)}")
    return result
