"""Whose process is at the other end of a connection within one host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

End = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def of_another_user(link: socket.socket) -> bool:
    """Whether the kernel says that another user's process is at the other end of `link`.

    root is nobody else, as it can do everything. False for a peer on another host, and where the
    kernel does not tell.
    """
    if link.family == socket.AF_UNIX:
        with contextlib.suppress(OSError, AttributeError):
            _, user, _ = struct.unpack(
                "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            return user not in (0, os.geteuid())
        return False
    own, peer = _end(*link.getsockname()[:2]), _end(*link.getpeername()[:2])
    if not peer[0].is_loopback:
        return False
    users = {}
    ports = {f"{own[1]:04X}", f"{peer[1]:04X}"}
    for file in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in Path("/proc/net", file).read_text().splitlines()[1:]:
                fields = row.split()
                if {fields[1][-4:], fields[2][-4:]} == ports:  # a host may have thousands
                    users[_in_table(fields[1]), _in_table(fields[2])] = int(fields[7])
    ours, theirs = users.get((own, peer)), users.get((peer, own))
    return None not in (ours, theirs) and theirs not in (0, ours)


def _end(address: str, port: int) -> End:
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found, port


def _in_table(text: str) -> End:
    """An address and port of the kernel's table, which has words of 32 bits in the host's order."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _end(str(ipaddress.ip_address(packed)), int(port, 16))
