"""What the probe finds out about the network: names, interfaces, and who can connect to whom."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allhands.doctor.host_facts import number_in
from allhands.wire import Acceptor, RefusedError, encode, join, listen, read_message
from allhands.world.interface import own_addresses

CONNECT_S = 3.0
RESOLVE_S = 5.0
CHUNK = 1 << 18


def threads(
    jobs: Mapping[str, Callable[[], Any]], timeout: float, late: Any = None
) -> dict[str, Any]:
    """What each of the functions returns, all at the same time; `late` for those that take longer
    than `timeout` seconds."""
    answers: dict[str, Any] = dict.fromkeys(jobs, late)

    def work(name: str) -> None:
        answers[name] = jobs[name]()

    running = [threading.Thread(target=work, args=(name,), daemon=True) for name in jobs]
    for thread in running:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def resolve(name: str) -> dict[str, Any]:
    """`addresses` of a name, or the `error`; asking a name server that is away is given up after
    some seconds."""

    def ask() -> dict[str, Any]:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            return {"addresses": [], "error": error.strerror or str(error)}
        # An IPv4 address in IPv6's clothes.
        plain = (str(one[4][0]).removeprefix("::ffff:") for one in found)
        return {"addresses": list(dict.fromkeys(plain)), "error": None}

    return threads(
        {"": ask}, RESOLVE_S, {"addresses": [], "error": f"no answer within {RESOLVE_S:.0f} s"}
    )[""]


def interfaces() -> list[dict[str, Any]]:
    """The interfaces that have an address and are not the loopback: speed in Mbit/s, None where the
    system does not know."""
    found: dict[str, dict[str, Any]] = {}
    for address, name in own_addresses().items():
        folder = Path("/sys/class/net", name)
        if name == "lo" or address.startswith("fe80"):
            continue
        # The speed that a virtual one claims is no speed at which anything was ever measured.
        virtual = not (folder / "device").exists()
        speed = None if virtual else number_in(folder / "speed")
        speed = speed if speed and speed > 0 else None
        entry = {
            "name": name,
            "addresses": list[str](),
            "speed": speed,
            "virtual": virtual,
            "mtu": number_in(folder / "mtu"),
        }
        found.setdefault(name, entry)["addresses"].append(address)
    return list(found.values())


def open_listener(token: str) -> tuple[Acceptor, int]:
    """The other end of `knock` and of `flood`, on a port that the system picks."""
    listener = listen()
    port = int(listener.getsockname()[1])
    acceptor = Acceptor("allhands doctor", [listener], token.encode(), _welcome)
    acceptor.start()
    return acceptor, port


def _welcome(link: socket.socket, said: dict[str, Any]) -> None:
    if said.get("flood"):
        threading.Thread(target=_take, args=(link,), daemon=True).start()
    else:
        link.close()


def _take(link: socket.socket) -> None:
    """Count what comes, and tell it."""
    buffer, got, first = bytearray(CHUNK), 0, time.monotonic()
    with link, contextlib.suppress(OSError):
        link.settimeout(15)
        while count := link.recv_into(buffer):
            first = first if got else time.monotonic()
            got += count
        link.sendall(encode({"bytes": got, "seconds": time.monotonic() - first}))


def _join(address: str, port: int, token: str, said: dict[str, Any]) -> socket.socket:
    def connect() -> socket.socket:
        return socket.create_connection((address, port), CONNECT_S)

    return join(connect, token.encode(), said, CONNECT_S)


def flood(address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
    """Send to a listener for so long; the bytes that it got, and the seconds between its first and
    its last."""
    chunk = bytes(CHUNK)
    with _join(address, port, token, {"flood": True}) as link:
        link.settimeout(10)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            link.sendall(chunk)
        link.shutdown(socket.SHUT_WR)
        return read_message(link, time.monotonic() + 10, 1 << 10)


def knock(name: str, port: int, token: str) -> dict[str, Any]:
    """Whether a listener of the examination answers under this name."""
    resolved = resolve(name)
    if resolved["error"]:
        return {"error": f"the name is not known ({resolved['error']})"}
    mine = own_addresses()
    answer: dict[str, Any] = {}
    for address in resolved["addresses"]:
        if address.startswith("127.") or address in ("::1", *mine):
            answer = {"address": address, "error": "that is this host itself"}
            continue
        try:
            with _join(address, port, token, {}) as link:
                own = str(link.getsockname()[0])
            return {"address": address, "own": own, "interface": mine.get(own), "error": None}
        except TimeoutError:
            answer = {"address": address, "error": "timed out"}
        except (RefusedError, EOFError):
            answer = {"address": address, "error": "something else answers there"}
        except OSError as error:
            answer = {"address": address, "error": error.strerror or str(error)}
    return answer
