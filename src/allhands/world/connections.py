"""The TCP connections of process groups, so that they can be ended where a rank is gone.

gloo gives no way to end an operation that waits for a rank which still lives and waits itself, and
destroying a group leaves its connections open as long as somebody holds one of its operations.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

# The variable of the workers of an elastic job: with how many workers it begins.
ELASTIC = "ALLHANDS_ELASTIC"
# Seconds in which processes that have met just now are to connect. One of them may be lost
# meanwhile, which nothing tells those that wait for it.
CONNECT_S = 30.0

# Of each connection, its descriptor and what tells whether that still is the same one.
_noted: list[tuple[int, tuple[int, int]]] = []


def is_elastic() -> bool:
    """Whether this process is a worker of a job whose members may change."""
    return bool(os.environ.get(ELASTIC))


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within, in a worker of an elastic job, gloo opens the connections that `end_all` ends."""
    before = present() if is_elastic() else None
    try:
        yield
    finally:
        if before is not None:
            new = present().items() - before.items()
            _noted.extend(
                (fd, same) for fd, same in new if _remote_port(fd) not in (_store(), None)
            )


def note(link: socket.socket) -> None:
    """`end_all` ends this connection, too."""
    if is_elastic():
        status = os.fstat(link.fileno())
        _noted.append((link.fileno(), (status.st_dev, status.st_ino)))


def end_all() -> None:
    """End the connections that were noted: whoever waits for something on one gets an error, here
    and on the other side."""
    ended, _noted[:] = list(_noted), []
    now = present()
    for fd, same in ended:
        if now.get(fd) == same:
            _shut_down(fd)


def end_since(before: dict[int, tuple[int, int]]) -> None:
    """End the TCP connections, but those to the store, that were opened after `present` gave
    `before`, and what listens for more."""
    for fd, _ in present().items() - before.items():
        if _remote_port(fd) != _store():
            _shut_down(fd, socket.AF_INET, socket.AF_INET6)


def _shut_down(fd: int, *families: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if not families or connection.family in families:
            connection.shutdown(socket.SHUT_RDWR)


def _store() -> int:
    """The port of the workers' store."""
    return int(os.environ.get("MASTER_PORT") or 0)


def present() -> dict[int, tuple[int, int]]:
    """The sockets of this process: of each descriptor, what tells it from a later one."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_dev, status.st_ino
    return found


def _remote_port(fd: int) -> int | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return int(connection.getpeername()[1])
    return None
