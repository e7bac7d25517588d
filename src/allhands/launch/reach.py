"""Which of one host's addresses another host reaches, and through which interface."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from allhands.world.interface import interface_with, is_loopback, own_addresses

# A firewall that drops packets makes each attempt last as long.
_EACH = 3.0


def reach(addresses: Sequence[str], port: int) -> dict[str, Any]:
    """Connect to `port` under each of the addresses or names, until one answers.

    Returns:
        ``address`` (numeric) that answered, and this host's ``own`` address and ``interface`` on
        the way there; or ``address`` None and ``tried``, what happened at each.
    """
    mine = own_addresses()
    tried = []
    for name in addresses:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            tried.append(f"{name}: {error.strerror or error}")
            continue
        for family, kind, protocol, _, target in found:
            address = str(target[0])
            if is_loopback(address.partition("%")[0]) or address in mine:
                tried.append(f"{name} is {address}, which is this host itself")
                continue
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.settimeout(_EACH)
                    probe.connect(target)
                    own = str(probe.getsockname()[0]).partition("%")[0]
            except OSError as error:
                tried.append(f"{address} port {port}: {error.strerror or error}")
                continue
            return {"address": address, "own": own, "interface": interface_with(own)}
    return {"address": None, "own": None, "interface": None, "tried": list(dict.fromkeys(tried))}
