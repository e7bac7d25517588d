"""The only place that binds a port."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(link: socket.socket) -> None:
    """Close a socket in processes that this one forks, such as loader workers.

    One that outlives this process would keep the connection open, and its end would not be seen.
    """
    _open.add(link)


def _close_all() -> None:
    for link in list(_open):
        with contextlib.suppress(OSError):
            link.close()


os.register_at_fork(after_in_child=_close_all)


def listen(address: str = "", port: int = 0, *, local: bool = False) -> socket.socket:
    """A TCP listener.

    Args:
        address: one of this host's addresses; "" is all of them, IPv4 and IPv6 where it has both.
        port: 0 lets the system choose one that is free.
        local: only processes of this host can connect (127.0.0.1); `address` is not looked at.

    Raises:
        OSError: the port is taken, or the address is not one of this host's.
    """
    if local:
        address = "127.0.0.1"
    if not address:
        try:
            listener = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
            )
        except (OSError, ValueError):  # a kernel without IPv6
            listener = socket.create_server(("", port), backlog=4096)
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=4096)
    close_in_children(listener)
    return listener


def listen_unix(name: str) -> socket.socket:
    """A listener on a Unix socket that only this user can open.

    Args:
        name: a path, or a NUL and a name in the abstract space of Linux, which leaves no file.

    Raises:
        OSError: the name is taken, too long, or of a kind that this system does not have.
    """
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(name)
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    close_in_children(listener)
    return listener


def free_port() -> int:
    """A port of 127.0.0.1 that is free now, for a program that cannot take a listener over."""
    with listen(local=True) as probe:
        return int(probe.getsockname()[1])
