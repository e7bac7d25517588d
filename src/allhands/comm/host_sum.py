"""Sums of small tensors over the ranks of one host, by messages through Unix sockets.

gloo hands each operation to threads of its own. On two cores that takes half a millisecond of
processor time, more than the whole step of a small model.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from allhands.comm.collectives import all_gather_text
from allhands.comm.traffic import Collective, tell
from allhands.errors import WorldError
from allhands.wire import Acceptor, RefusedError, job_token, join, listen_unix, open_unix, read_into
from allhands.wire.proof import PATIENCE
from allhands.world import World, connections
from allhands.world.subgroups import seconds_of_world

# Bytes of a tensor. Two messages may wait in a connection, for which Linux keeps 208 KiB.
_LARGEST = 1 << 16
# A rank sends its tensor to every other one.
_MOST_RANKS = 8
_HEAD = struct.Struct("<QQ")  # which sum of the group it is, and the tensor's bytes

_met: weakref.WeakKeyDictionary[Any, HostSum | None] = weakref.WeakKeyDictionary()


class HostSum:
    """Adds up small tensors over all ranks; each rank adds in the order of the ranks, so that all
    have the same bits.

    Args:
        rank: this one.
        links: blocking connections to the others, by rank.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket]) -> None:
        self._rank, self._links = rank, dict(sorted(links.items()))
        self._sums = 0

    def takes(self, flat: torch.Tensor) -> bool:
        """Whether a tensor is small enough."""
        return flat.nbytes <= _LARGEST

    def add_up(self, flat: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks in place; all of them call it together.

        Raises:
            WorldError: a rank is gone, has not come within the world's timeout, or adds up
                something else. No further sum can be made.
        """
        tell(Collective("all_reduce", flat.nbytes, len(self._links) + 1))
        with record_function("sockets:all_reduce"):
            self._add_up(flat)

    def _add_up(self, flat: torch.Tensor) -> None:
        self._sums += 1
        head = _HEAD.pack(self._sums, flat.nbytes)
        message, other_head = head + flat.view(torch.uint8).numpy().tobytes(), bytearray(_HEAD.size)
        parts, other = {self._rank: flat}, self._rank
        try:
            for other, link in self._links.items():  # noqa: B007 - an error names it
                link.sendall(message)
            for other, link in self._links.items():
                read_into(link, memoryview(other_head))
                if other_head != head:
                    self.close()
                    sums, size = _HEAD.unpack(other_head)
                    raise WorldError(
                        f"rank {self._rank} adds up {flat.nbytes} bytes in sum {self._sums} of "
                        f"this host, and rank {other} {size} bytes in sum {sums}. Every rank must "
                        "make the same calls in the same order"
                    )
                parts[other] = torch.empty_like(flat)
                read_into(link, parts[other].view(torch.uint8).numpy().data)
        except TimeoutError as error:
            self.close()
            raise WorldError(
                f"rank {other} did not take part in a sum of small tensors within "
                f"{link.gettimeout():.0f} s"
            ) from error
        except (OSError, EOFError) as error:
            self.close()
            raise WorldError(f"Connection closed by peer: rank {other} of this host") from error
        total = parts[0]
        for rank in range(1, len(parts)):
            total = total + parts[rank]
        flat.copy_(total)

    def close(self) -> None:
        """End the connections, so that nobody waits for this rank."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def host_sum(world: World) -> HostSum | None:
    """What adds up small tensors on the processor over all ranks, where these are a few processes
    of one host; else None. All ranks call it together; a group has one."""
    few = 1 < world.world_size == world.local_world_size <= _MOST_RANKS
    if not few or world.device.type != "cpu" or sys.platform != "linux":
        return None
    if dist.get_backend() != "gloo":  # mpi, or a plan's
        return None
    group = dist.group.WORLD
    if group not in _met:
        links = _meet(world)
        _met[group] = None if links is None else HostSum(world.rank, links)
    return _met[group]


def _meet(world: World) -> dict[int, socket.socket] | None:
    """Connections to all other ranks; None on all ranks where one cannot reach another."""
    came: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    name = f"\0allhands-sum-{secrets.token_hex(16)}"
    try:
        listener = listen_unix(name)
    except OSError:
        name, acceptor = "", None
    else:
        acceptor = Acceptor(
            "the sums of this host",
            [listener],
            job_token(name),
            lambda link, said: came.put((int(said["rank"]), link)),
        )
        acceptor.start()
    links: dict[int, socket.socket] = {}
    names = all_gather_text(name, world)
    try:
        if all(names):
            for rank in range(world.rank):
                links[rank] = join(
                    partial(open_unix, names[rank]), job_token(names[rank]), {"rank": world.rank}
                )
            while len(links) < world.world_size - 1:
                rank, link = came.get(timeout=PATIENCE)
                links[rank] = link
    except (OSError, EOFError, RefusedError, queue.Empty):
        names = []  # ranks of other namespaces, as of containers
    finally:
        if acceptor is not None:
            acceptor.close()
    if not all(all_gather_text("met" if names and all(names) else "", world)):
        for link in links.values():
            link.close()
        return None
    for link in links.values():
        link.settimeout(seconds_of_world())
        connections.note(link)
    return links
