"""The connections of a process group of nccl, made so that nobody waits for a rank that is gone.

nccl waits for ever for a rank that is lost while the group connects, and an operation that waits so
cannot be aborted. So a thread makes the connections, and where it is not to go on, its sockets are
shut down under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allhands.compat import connect_group
from allhands.errors import WorldError
from allhands.world import connections

if TYPE_CHECKING:
    import torch

_LOOK_EVERY = 0.05
# Seconds for a thread whose sockets were shut down. It is left behind afterwards.
_END_S = 5.0


def connect(
    group: Any, device: torch.device, seconds: float, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Connect a process group of nccl; its members call it together.

    Args:
        group: whose operations have not been called yet.
        device: of this rank.
        seconds: the longest time it may take.
        given_up: whether a member is lost; asked again and again.

    Raises:
        WorldError: the members did not connect.
    """

    def first_operation() -> None:
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(device)
        connect_group(group, device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.current_stream().synchronize()

    run_over_sockets(first_operation, seconds, given_up)


def run_over_sockets(
    operation: Callable[[], Any], seconds: float, given_up: Callable[[], bool]
) -> None:
    """Run an operation that opens sockets and may wait at them for ever."""
    before = connections.present()
    done, failed = threading.Event(), []

    def run() -> None:
        try:
            operation()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="allhands-nccl-connect", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not done.wait(_LOOK_EVERY):
        is_late = time.monotonic() > deadline
        if is_late or given_up():
            connections.end_since(before)
            done.wait(_END_S)
            why = f"within {seconds:.0f} s" * is_late or "before a member was lost"
            raise WorldError(f"the process group of nccl was not connected {why}")
    if failed:
        raise WorldError(f"the process group of nccl was not connected: {failed[0]}") from failed[0]
