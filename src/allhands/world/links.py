"""Connections between the processes of one job, apart from those of torch."""

from __future__ import annotations

import socket

# A connection whose other end does not answer the kernel for so long is cut.
_CUT_MS = 20_000


def listen() -> socket.socket:
    """A listener on a port of the system's choice, on all addresses of this host, IPv4 and IPv6 where it has both."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except (OSError, ValueError):  # no IPv6 here
        return socket.create_server(("", 0), backlog=1024)


def keep_alive(link: socket.socket) -> None:
    """Let the kernel notice a cut network within about 20 seconds, where it can."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", _CUT_MS)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
