"""How the tasks that srun has started, one on each node, meet and agree on who starts how many workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from allhands.errors import UserError, WorldError
from allhands.launch.job import INTERFACE_VARIABLES
from allhands.launch.plan import Place
from allhands.launch.protocol import encode
from allhands.launch.python import same_version, versions
from allhands.world import beacon
from allhands.world.interface import interface_with, is_loopback
from allhands.world.links import keep_alive, listen

MEETING_TIMEOUT = 600.0
_ANSWER_S = 10.0
_LONGEST_LINE = 1 << 16
_meetings = itertools.count()

Told = list[dict[str, Any]]


class Circle:
    """The tasks of all nodes, seen from the one of this node.

    Attributes:
        node: which one this is; 0 leads.
        hosts: the name of each node's host.
        counts: how many workers each node has.
        links: on the leader one connection for each other node, in their order; else the one to the leader.
    """

    def __init__(self, node: int, told: Sequence[dict[str, Any]], links: Sequence[socket.socket]) -> None:
        self.node, self.links = node, list(links)
        self.hosts = [str(one["host"]) for one in told]
        self.counts = [int(one["workers"]) for one in told]
        here = self.links[0].getsockname()[0] if node == 0 else self.links[0].getpeername()[0]
        #: The leader's address, as the other nodes reach it.
        self.address = _plain(here)

    def places(self, servers: int = 0) -> list[Place]:
        """Each node's part of the job, with one of the `servers` a node in turn; the network interface is this node's own."""
        name = interface_with(_plain(self.links[0].getsockname()[0]))
        defaults = dict.fromkeys(INTERFACE_VARIABLES, name) if name and not is_loopback(self.address) else {}
        return [
            Place(count, range(index, servers, len(self.counts)), self.address, defaults if index == self.node else {})
            for index, count in enumerate(self.counts)
        ]

    @property
    def store_address(self) -> str:
        """Where the leader's store listens: on all addresses, of the family that the others use."""
        return "::" if ":" in self.address else ""

    def tell(self, **message: Any) -> None:
        """On the leader: how it ended, to all others."""
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sendall(encode({"op": "end", **message}))

    def close(self) -> None:
        """Let go of the other tasks."""
        for link in self.links:
            link.close()


def gather(node: int, hosts: Sequence[str], key: str, workers: int, refused: str | None = None,
           timeout: float = MEETING_TIMEOUT) -> Circle:  # fmt: skip
    """Meet the tasks of the other nodes; to be called on all of them, equally often.

    Args:
        node: which node this is.
        hosts: the nodes' names, in order; there are at least two.
        key: names the step that the tasks belong to.
        workers: how many this node is to start.
        refused: why it cannot.
        timeout: seconds.

    Raises:
        UserError: a node refused.
        WorldError: nodes did not come, or have other versions of Python, torch or allhands.
    """
    key = f"{key} nodes {next(_meetings)}"
    said = {"node": node, "host": socket.gethostname(), "workers": workers, "refused": refused, "versions": versions()}
    told, links = _lead(said, hosts, key, timeout) if node == 0 else _follow(said, hosts, key, timeout)
    circle = Circle(node, told, links)
    try:
        _check(told)
    except BaseException:
        circle.close()
        raise
    return circle


def _lead(said: dict[str, Any], hosts: Sequence[str], key: str, timeout: float) -> tuple[Told, list[socket.socket]]:
    deadline = time.monotonic() + timeout
    came: dict[int, tuple[dict[str, Any], socket.socket]] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen())
        stack.callback(beacon.Beacon(key, listener.getsockname()[1], local=False).close)
        while len(came) < len(hosts) - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
                link.settimeout(_ANSWER_S)
                hello = json.loads(_read_line(link))
                if hello["key"] != key or not 0 < hello["node"] < len(hosts) or hello["node"] in came:
                    raise ValueError("this is no other task of ours")
                came[hello["node"]] = (hello, link)
            except (ValueError, KeyError, TypeError):
                link.close()
            except OSError:
                if time.monotonic() > deadline:
                    for _, link in came.values():
                        link.close()
                    missing = [hosts[index] for index in range(1, len(hosts)) if index not in came]
                    raise WorldError(
                        f"{len(came) + 1} of {len(hosts)} nodes met within {timeout:.0f} s; missing: {', '.join(missing[:8])}. "
                        "Every task must come to the same call; look at what the tasks there print."
                    ) from None
    told = [said, *(came[index][0] for index in sorted(came))]
    links = [came[index][1] for index in sorted(came)]
    for link in links:
        link.settimeout(None)
        keep_alive(link)
        with contextlib.suppress(OSError):
            link.sendall(encode({"told": told}))
    return told, links


def _follow(said: dict[str, Any], hosts: Sequence[str], key: str, timeout: float) -> tuple[Told, list[socket.socket]]:
    deadline = time.monotonic() + timeout
    host, port = beacon.ask(key, hosts, timeout)
    link = None
    try:
        link = socket.create_connection((host, port), _ANSWER_S)
        link.sendall(encode({"key": key, **said}))
        link.settimeout(max(1.0, deadline - time.monotonic()))
        told = json.loads(_read_line(link))["told"]
    except (OSError, ValueError, KeyError) as error:
        if link is not None:
            link.close()
        raise WorldError(
            f"{socket.gethostname()} reached the task on {host}, port {port}, and then lost it ({error}); look at what that task "
            "prints"
        ) from None
    link.settimeout(None)
    keep_alive(link)
    return told, [link]


def _check(told: Sequence[dict[str, Any]]) -> None:
    for one in told:
        if one["refused"]:
            raise UserError(f"{one['host']}: {one['refused']}")
    for one in told[1:]:
        for name, version in told[0]["versions"].items():
            other = str(one["versions"].get(name))
            if not same_version(name, version, other):
                raise WorldError(
                    f"{one['host']} has {name} {other}, but {told[0]['host']} has {name} {version}; install the same on all nodes"
                )


def _plain(address: str) -> str:
    return address.partition("%")[0].removeprefix("::ffff:")


def _read_line(link: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = link.recv(_LONGEST_LINE)
        if not piece or len(data) > 64 * _LONGEST_LINE:
            raise OSError("the connection ended")
        data += piece
    return data
