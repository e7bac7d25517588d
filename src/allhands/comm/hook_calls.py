"""What a user's hook calls that needs other ranks: collectives of torch.distributed, and calls of
ours such as `evaluate`.

Hooks run between two noted calls (`allhands.comm.calls`). A hook that makes a collective on some
ranks alone would block them, or exchange it with whatever the others do next. So, while a hook runs
in a watched training, this module

* logs each collective, by process group. Members of a group must make the same ones between the
  same two noted calls, which the watcher compares;
* lets a collective wait, when it is the first of its kind in the hook, until all members of its
  group have come to it. It does not reach the other ranks before, so that nothing is exchanged with
  a call of another kind.

Outside of hooks nothing is logged.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from allhands.comm import log
from allhands.comm.log import Label, text_of, users_line

_KEPT = 256  # calls a group
# Longer than a mismatch takes to be told. A member that is only slow is then waited for in the
# collective itself.
_LONGEST_WAIT = 20.0

# Methods of a ProcessGroup behind the public functions; releases of torch have some of them each.
_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
# Those whose tensors have as many elements on every rank.
_SAME_SIZE = {"allreduce", "broadcast", "reduce"}


class Watched(Protocol):
    """What a watcher is asked for."""

    def meeting_store(self) -> Any:
        """A store for the thread that makes the calls, with the same keys on all ranks."""

    def section(self) -> int:
        """How many calls the thread has noted since the watch began."""


@dataclass
class GroupLog:
    """The calls of one process group's members in hooks: (noted calls before it, what it is, the
    user's line)."""

    ranks: tuple[int, ...]
    calls: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))


#: By the group's name.
logs: dict[str, GroupLog] = {}
_watched: list[Watched] = []
# (hook, call, group) for which all members have met once.
_known: set[tuple[Label, str, str]] = set()
_thread = 0  # that runs the hook; 0 while none does
# (owner, name, what it was)
_replaced: list[tuple[Any, str, Any]] = []
_replaced_in_hook: list[tuple[Any, str, Any]] = []


def begin(watched: Watched) -> None:
    """A watch begins."""
    if not _watched:
        logs.clear()
        _known.clear()
        _replace_methods()
    _watched.append(watched)


def end(watched: Watched) -> None:
    """A watch ends."""
    with contextlib.suppress(ValueError):
        _watched.remove(watched)
    if not _watched:
        _put_back(_replaced)


def enter(callback: object, hook: str) -> Label:
    """A hook of the user's begins; returns what `leave` is to be given."""
    global _thread
    before = log.place
    log.position(("in", type(callback).__name__, hook))
    if _watched and not _thread:
        _thread = threading.get_ident()
        _replace_resolver()
    return before


def leave(before: Label) -> None:
    """The hook has ended, also by an error."""
    global _thread
    log.position(before)
    if _thread and before == "":
        _thread = 0
        _put_back(_replaced_in_hook)


def together(label: Label) -> None:
    """Say that this rank begins a call for which all ranks are needed. It waits for them where a
    hook makes the call."""
    if _thread == threading.get_ident():
        import torch.distributed as dist

        _called(dist.group.WORLD, text_of(label), sys._getframe(1))


def _called(group: Any, label: str, frame: FrameType | None) -> None:
    if _thread != threading.get_ident() or not _watched:
        return
    import torch.distributed as dist

    name = group.group_name
    known = logs.get(name)
    if known is None:
        known = logs[name] = GroupLog(tuple(dist.get_process_group_ranks(group)))
    section = log.made
    known.calls.append((section, label, f"{users_line(frame)}; {text_of(log.place)}"))
    first = (log.place, label, name)
    if first not in _known and len(known.ranks) > 1:
        _known.add(first)
        number = sum(1 for call in known.calls if call[0] == section)
        watched = _watched[0]
        _meet(watched, f"meet/{name}/{watched.section()}/{number}/{label}", len(known.ranks))


def _meet(watched: Watched, key: str, members: int) -> None:
    """Wait until all members of a group have come to the same call."""
    deadline, pause = time.monotonic() + _LONGEST_WAIT, 0.0005
    try:
        store = watched.meeting_store()
        come = store.add(key, 1)
        while come < members and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
            come = store.add(key, 0)
    except (
        RuntimeError
    ):  # torch.distributed's errors: the store is gone, and the collective will say so
        return


def _replace_methods() -> None:
    import torch.distributed as dist

    for name in _METHODS:
        original = vars(dist.ProcessGroup).get(name)
        if original is not None:
            _replaced.append((dist.ProcessGroup, name, original))
            setattr(dist.ProcessGroup, name, _method(name, getattr(dist.ProcessGroup, name)))


def _replace_resolver() -> None:
    """DTensor's collectives go to native code from here, and all of them ask for their group first.

    It is replaced in hooks only, because torch.compile reads it.
    """
    import torch.distributed._functional_collectives as functional

    for name in ("_resolve_group", "_resolve_group_name"):
        original = getattr(functional, name, None)
        if original is not None:
            _replaced_in_hook.append((functional, name, original))
            setattr(functional, name, _resolver(original))
            return


def _put_back(replaced: list[tuple[Any, str, Any]]) -> None:
    while replaced:
        owner, name, original = replaced.pop()
        setattr(owner, name, original)


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread:
            frame = sys._getframe(1)
            label = _public_name(frame, "distributed_c10d.py") or f"ProcessGroup.{name}"
            if name in _SAME_SIZE:
                label += _size_of(args[0] if args else None)
            _called(group, label, frame)
        return original(group, *args, **kwargs)

    return call


def _resolver(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(group: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(group, *args, **kwargs)
        if _thread:
            from torch.distributed import distributed_c10d

            by_name: Any = distributed_c10d._resolve_process_group
            frame = sys._getframe(1)
            name = _public_name(frame, "_functional_collectives.py")
            if name:
                _called(by_name(found) if isinstance(found, str) else found, name, frame)
        return found

    return resolve


def _public_name(frame: FrameType | None, file: str) -> str:
    """The outermost function of torch's `file` that this call comes from; "" for a call from
    elsewhere."""
    name = ""
    while frame is not None and frame.f_code.co_filename.endswith(
        (file, "c10d_logger.py", "contextlib.py")
    ):
        if frame.f_code.co_filename.endswith(file):
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"torch.distributed.{name}" if name else ""


def _size_of(tensors: Any) -> str:
    if not isinstance(tensors, (list, tuple)):
        tensors = [tensors]
    sizes = [tensor.numel() for tensor in tensors if hasattr(tensor, "numel")]
    return f" of {sum(sizes)} element{'' if sum(sizes) == 1 else 's'}" if sizes else ""
