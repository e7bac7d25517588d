"""The rendezvous of tasks that srun has started, one on each node: they agree on how many workers
each of them starts."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from allhands import wire
from allhands.errors import UserError, WorldError
from allhands.launch.meeting import INTERFACE_VARIABLES
from allhands.launch.plan import HostPart
from allhands.launch.python import same_version, versions
from allhands.world import discovery
from allhands.world.interface import interface_with, is_loopback

MEETING_TIMEOUT = 600.0
_LONGEST_LINE = 1 << 22
_LONGEST_REASON = 2000
_meetings = itertools.count()

Hellos = list[dict[str, Any]]


class Rendezvous:
    """The tasks of all nodes, seen from the one of this node.

    Attributes:
        node: which one this is; 0 leads.
        hosts: the name of each node's host.
        counts: how many workers each node has.
        links: on the leader one connection for each other node, in their order; else the one to the
            leader.
    """

    def __init__(
        self, node: int, hellos: Sequence[dict[str, Any]], links: Sequence[socket.socket]
    ) -> None:
        self.node, self.links = node, list(links)
        self.hosts = [str(one["host"]) for one in hellos]
        self.counts = [int(one["workers"]) for one in hellos]
        here = self.links[0].getsockname()[0] if node == 0 else self.links[0].getpeername()[0]
        #: The leader's address, as the other nodes reach it.
        self.address = _plain(here)

    def places(self, servers: int = 0) -> list[HostPart]:
        """Each node's part of the job, with one of the `servers` a node in turn; the network
        interface is this node's own."""
        name = interface_with(_plain(self.links[0].getsockname()[0]))
        if name and not is_loopback(self.address):
            defaults = dict.fromkeys(INTERFACE_VARIABLES, name)
        else:
            defaults = {}
        return [
            HostPart(
                count,
                range(index, servers, len(self.counts)),
                self.address,
                defaults if index == self.node else {},
            )
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
                link.sendall(wire.encode({"op": "end", **message}))

    def close(self) -> None:
        """Let go of the other tasks."""
        for link in self.links:
            link.close()


def gather(
    node: int,
    hosts: Sequence[str],
    key: str,
    workers: int,
    refused: str | None = None,
    timeout: float = MEETING_TIMEOUT,
) -> Rendezvous:
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
    why = None if refused is None else refused[:_LONGEST_REASON]
    own = {
        "node": node,
        "host": socket.gethostname(),
        "workers": workers,
        "refused": why,
        "versions": versions(),
    }
    hellos, links = (
        _lead(own, hosts, key, timeout) if node == 0 else _follow(own, hosts, key, timeout)
    )
    rendezvous = Rendezvous(node, hellos, links)
    try:
        _check(hellos)
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


def _lead(
    own: dict[str, Any], hosts: Sequence[str], key: str, timeout: float
) -> tuple[Hellos, list[socket.socket]]:
    came: dict[int, tuple[dict[str, Any], socket.socket]] = {}
    everyone = threading.Event()

    def welcome(link: socket.socket, hello: dict[str, Any]) -> None:
        node = int(hello["node"])
        if not 0 < node < len(hosts) or node in came:
            raise wire.RefusedError("it is no other task of this job")
        came[node] = hello, link
        if len(came) == len(hosts) - 1:
            everyone.set()

    acceptor, _ = discovery.accept(key, "the rendezvous of the nodes", welcome, local=False)
    try:
        met = everyone.wait(timeout)
    finally:
        acceptor.close()
    links = [came[index][1] for index in sorted(came)]
    if not met:
        for link in links:
            link.close()
        missing = [hosts[index] for index in range(1, len(hosts)) if index not in came]
        raise WorldError(
            f"{len(came) + 1} of {len(hosts)} nodes met within {timeout:.0f} s; missing: "
            f"{', '.join(missing[:8])}. "
            "Every task must come to the same call; look at what the tasks there print."
        )
    hellos = [own, *(came[index][0] for index in sorted(came))]
    for link in links:
        wire.keep_alive(link)
        with contextlib.suppress(OSError):
            link.sendall(wire.encode({"nodes": hellos}))
    return hellos, links


def _follow(
    own: dict[str, Any], hosts: Sequence[str], key: str, timeout: float
) -> tuple[Hellos, list[socket.socket]]:
    deadline = time.monotonic() + timeout
    host, link = discovery.find(key, hosts, timeout, own)
    try:
        hellos: Hellos = wire.read_message(link, deadline, _LONGEST_LINE)["nodes"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        link.close()
        raise WorldError(
            f"{socket.gethostname()} reached the task on {host} and then lost it ({error}); look "
            "at what that task prints"
        ) from None
    wire.keep_alive(link)
    return hellos, [link]


def _check(hellos: Sequence[dict[str, Any]]) -> None:
    for one in hellos:
        if one["refused"]:
            raise UserError(f"{one['host']}: {one['refused']}")
    for one in hellos[1:]:
        for name, version in hellos[0]["versions"].items():
            other = str(one["versions"].get(name))
            if not same_version(name, version, other):
                raise WorldError(
                    f"{one['host']} has {name} {other}, but {hellos[0]['host']} has {name} "
                    f"{version}; install the same on all nodes"
                )


def _plain(address: str) -> str:
    return address.partition("%")[0].removeprefix("::ffff:")
