"""Process groups that are aborted, as a worker is lost."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Protocol
from weakref import WeakSet

from allhands.errors import WorldError
from allhands.world import World, group
from allhands.world.connections import is_elastic


class Captured(Protocol):
    """CUDA graphs with exchanges of a process group."""

    def reset(self) -> None:
        """Let go of them; from any thread, and more than once."""


_captured: WeakSet[Captured] = WeakSet()
_lock = Lock()


def aborted_group() -> Callable[[], bool] | None:
    """In an elastic job: what tells whether the world's group was aborted, as a worker is lost."""
    state = group.state()
    return state.is_aborted if state is not None and is_elastic() else None


def aborted_error() -> WorldError:
    """The error of what needs a group that was aborted."""
    return WorldError("the process group was aborted, as a worker is lost")


def check_not_aborted(world: World) -> None:
    """Raise `WorldError` where the group was aborted: on a GPU, operations then end without a word,
    and what they give is not to be used. Waits for them there."""
    if world.device.type == "cuda":
        import torch  # launchers do without

        torch.cuda.synchronize(world.device)
    is_aborted = aborted_group()
    if is_aborted is not None and is_aborted():
        raise aborted_error()


def reset_at_abort(graphs: Captured) -> None:
    """Let these graphs be reset while the group is aborted: nccl waits for that."""
    with _lock:
        _captured.add(graphs)


def reset_captured() -> None:
    """Reset what was given to `reset_at_abort`."""
    with _lock:
        present = list(_captured)
    for graphs in present:
        graphs.reset()
