"""Connections between the processes of one job."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import Any

from allhands.wire import proof
from allhands.wire.listeners import close_in_children

# A connection whose other end does not answer the kernel for so long is cut.
_CUT_MS = 20_000


def keep_alive(link: socket.socket) -> None:
    """Notice a cut network, or a peer that reads nothing, within about 20 seconds."""
    at_once(link)
    if link.family == socket.AF_UNIX:
        return
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _CUT_MS),
    ):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def at_once(link: socket.socket) -> None:
    """Send small messages at once, and let the kernel look for a peer that is gone."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def open_unix(name: str) -> socket.socket:
    """A connection to a `listen_unix` of this name.

    Raises:
        OSError: there is none, or it is of another network namespace.
    """
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(name)
    except OSError:
        link.close()
        raise
    return link


def join(
    connect: Callable[[], socket.socket],
    token: bytes,
    said: dict[str, Any],
    patience: float | None = None,
) -> socket.socket:
    """A connection whose two sides have proven the job's token to each other.

    A listener that has too many strangers closes the oldest connection, which may be this one; so
    one that ends or says nothing before the proof is made anew.

    Args:
        connect: opens a connection; what it raises is passed on.
        token: the job's.
        said: what this process says of itself.
        patience: seconds in which such a connection is made anew, and that one proof takes at most;
            None: as many as any proof.

    Raises:
        RefusedError: the other side speaks something else, or either does not know the token.
        OSError, EOFError: it cannot be reached, or is too slow.
    """
    patience = proof.PATIENCE if patience is None else patience
    deadline = time.monotonic() + patience
    while True:
        link = connect()
        try:
            proof.introduce(link, token, said, min(patience, proof.PATIENCE))
            at_once(link)
        except (EOFError, ConnectionError, TimeoutError):
            link.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.02, 0.2))
        except BaseException:
            link.close()
            raise
        else:
            close_in_children(link)
            return link
