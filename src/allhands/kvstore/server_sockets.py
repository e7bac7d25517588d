"""The two connections to a parameter server: one to send on, one to read from."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from allhands import wire
from allhands.kvstore.credentials import tls_contexts

TRANSPORT = "ALLHANDS_KVSTORE_TRANSPORT"
# Left to itself, a worker takes the last one that the server's host allows: memory only when it is
# the same host.
TRANSPORTS = ("tcp", "unix", "shared")


class ServerSockets(NamedTuple):
    """Both connections; and whether memory can be mapped, as both ends are on one host."""

    up: socket.socket
    down: socket.socket
    maps: bool


def connect(
    where: Mapping[str, Any],
    token: bytes,
    said: Mapping[str, Any],
    transport: str = "auto",
    patience: float | None = None,
) -> ServerSockets:
    """Connect twice, because a connection with TLS is not read and written at once.

    Args:
        where: the server's announcement.
        token: the job's.
        said: what this process says of itself.
        transport: "auto", or one of `TRANSPORTS`.
        patience: seconds for which an answer is waited for; None: 10.

    Raises:
        RefusedError, OSError, EOFError: as of `wire.join`.
    """
    session, maps = secrets.token_hex(8), False
    links: list[socket.socket] = []
    try:
        for side in ("up", "down"):
            words = {**said, "session": session, "side": side, "maps": False}

            def opened(words: dict[str, Any] = words) -> socket.socket:
                link = _open(where, transport, patience or 10.0)
                words["maps"] = link.family == socket.AF_UNIX and transport != "unix"
                return link

            links.append(wire.join(opened, token, words, patience))
            maps = words["maps"]
    except BaseException:
        for link in links:
            link.close()
        raise
    return ServerSockets(links[0], links[1], maps)


def _open(where: Mapping[str, Any], transport: str, patience: float) -> socket.socket:
    if where["unix"] and transport != "tcp":
        with contextlib.suppress(OSError):  # another host or network namespace, or it is gone
            return wire.open_unix("\0" + where["unix"])
    if transport in ("unix", "shared"):
        raise OSError(f"{TRANSPORT}={transport}, but it is on another host; leave the variable out")
    link = socket.create_connection((where["address"], where["port"]), timeout=patience)
    contexts = tls_contexts(os.environ)
    try:
        return link if contexts is None else contexts[1].wrap_socket(link)
    except OSError:
        link.close()
        raise
