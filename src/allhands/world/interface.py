"""Which network interface reaches the other hosts.

Left alone, gloo resolves this host's own name, which on many systems is a loopback address
(127.0.1.1) that no other host can reach: one side then fails with "connection refused" and the
other waits for five times the group's timeout. So the interface is the one through which the kernel
would send to another host of the world.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allhands.world.membership import Member

_log = logging.getLogger(__name__)
VARIABLE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def address_towards(host: str, port: int = 9) -> str | None:
    """This machine's own address on the route to `host`, None without a route. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        try:
            # Connecting a datagram socket only looks the route up.
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    """Whether `address` (numeric) stays within one host."""
    return ipaddress.ip_address(address).is_loopback


def interface_with(address: str) -> str | None:
    """The name of the interface that has `address` (numeric, IPv4 or IPv6); None where the system
    does not tell."""
    # 127.0.0.1 and 127.0.1.1 are both lo's, which reports only the first.
    wanted = "127.0.0.1" if ":" not in address and is_loopback(address) else address
    return own_addresses().get(wanted)


def own_addresses() -> dict[str, str]:
    """Each address of this host and the interface that has it, IPv4 first; empty where the system
    does not tell."""
    return _addresses_v4() | _addresses_v6()


def outward_addresses() -> list[str]:
    """The addresses of this host that are of use to others."""
    # A link-local IPv6 address means nothing without the name of the caller's own interface.
    return [
        address
        for address in own_addresses()
        if not is_loopback(address) and not address.startswith("fe80:")
    ]


def reachable_addresses() -> list[str]:
    """Addresses of this host that others may reach: the one that ssh came in through first, then
    those of its interfaces."""
    came_in = os.environ.get("SSH_CONNECTION", "").split()
    return list(dict.fromkeys([*came_in[2:3], *outward_addresses()]))


def _addresses_v4() -> dict[str, str]:
    try:
        import fcntl
    except ImportError:
        return {}
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.setdefault(socket.inet_ntoa(reply[20:24]), name)
    return found


def _addresses_v6() -> dict[str, str]:
    """From the kernel's table: 32 hex digits, four fields, the interface's name."""
    try:
        rows = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return {}
    fields = [row.split() for row in rows if row]
    return {str(ipaddress.ip_address(bytes.fromhex(row[0]))): row[5] for row in fields}


def set_for_gloo(members: list[Member], rank: int) -> bool:
    """Set GLOO_SOCKETVARIABLE to the interface that reaches the other hosts; True when it was set
    (it was unset before).
    """
    own = members[rank]
    if os.environ.get(VARIABLE) or own.backend == "mpi":
        return False
    others = [member for member in members if member.host != own.host]
    if others:
        # Rank 0's host is what the others reached; rank 0 itself looks towards one of them.
        peers = [
            member.address
            for member in others
            if member.address and not is_loopback(member.address)
        ]
        routes = [address_towards(peer) for peer in peers[:1]] + [own.address or None]
    else:
        routes = ["127.0.0.1"]
    for address in routes:
        if address is None or (others and is_loopback(address)):
            continue
        name = interface_with(address)
        if name is not None:
            os.environ[VARIABLE] = name
            if others:
                _log.info("rank %d: gloo uses interface %s (%s)", rank, name, address)
            return True
    if others:
        _log.warning(
            "rank %d found no interface towards the other hosts; if gloo cannot connect, set %s",
            rank,
            VARIABLE,
        )
    return False
