"""Several workers on one GPU, through nccl's sockets."""

from __future__ import annotations

import ctypes
import os
import platform
import socket

_CLONE_NEWUTS = 0x04000000


def own_host() -> None:
    """Give this process a name of a host of its own: nccl takes several workers on one GPU where
    each is on another host."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(f"worker-{os.environ.get('RANK', '')}")
        platform._uname_cache = None  # type: ignore[attr-defined]
