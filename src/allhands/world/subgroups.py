"""Process groups beside the default one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from allhands.compat import set_group_timeout
from allhands.world import connections, group, nccl_connections
from allhands.world.connections import is_elastic
from allhands.world.request import DEFAULT_TIMEOUT


def make_subgroup(
    ranks: Sequence[int] | None,
    seconds: float | None = None,
    backend: str | None = None,
    desc: str | None = None,
) -> Any:
    """A group of some ranks; all ranks of the default group call it together.

    In an elastic job its connections end with those of the default group, and a rank that is lost
    while it is made is waited for no longer than there.

    Args:
        ranks: its members; None: all.
        seconds: for which an operation waits; None: PyTorch's default, in an elastic job that of
            the world.
        backend: of its operations; None: that of the default group.
        desc: what it is for.
    """
    import torch.distributed as dist

    connect = seconds
    if is_elastic():
        connect, seconds = connections.CONNECT_S, seconds or seconds_of_world()
    with connections.noted():
        made = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=None if connect is None else timedelta(seconds=connect),
            backend=backend,
            group_desc=desc,
        )
    if made is dist.GroupMember.NON_GROUP_MEMBER:
        return made
    state = group.state()
    if state is not None and is_elastic() and dist.get_backend(made) == "nccl":
        limit = seconds_of_world()
        nccl_connections.connect(made, state.world.device, limit, state.is_aborted)
    if seconds is not None and connect != seconds:
        set_group_timeout(seconds, made)
    return made


def seconds_of_world() -> float:
    """For which a collective of the world waits."""
    state = group.state()
    told = None if state is None else state.request.timeout
    return told or DEFAULT_TIMEOUT.total_seconds()
