"""A rank's connection to the coordinator."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from allhands import wire
from allhands.errors import WorldError
from allhands.horovod.coordinator import Coordinator
from allhands.horovod.matcher import Matcher
from allhands.horovod.operation_request import Key, OperationRequest
from allhands.horovod.promise_rounds import Parts
from allhands.world import World
from allhands.world.interface import outward_addresses
from allhands.world.membership import host_id

_PATIENCE_S = 60.0


class CoordinatorLink:
    """What this rank says and hears. Rank 0's holds the coordinator as well.

    Args:
        world: the processes.
        store: a `torch.distributed.Store` that they share, for this link alone; None for a process
            alone.
        matcher: on rank 0, what matches the operations.
        slots: how many different operations are remembered, so that they are named by a number when
            they come again.
    """

    def __init__(self, world: World, store: Any, matcher: Matcher | None, slots: int) -> None:
        self._coordinator: Coordinator | None = None
        self._lock = threading.Lock()
        self._slots = slots
        self._known: OrderedDict[tuple[Key, OperationRequest], int] = OrderedDict()
        self._rounds: dict[Parts, int] = {}
        if matcher is not None:
            token = secrets.token_hex(32)
            local = world.local_world_size == world.world_size
            self._coordinator = Coordinator(matcher, wire.job_token(token), local)
            self._coordinator.start()
            addresses = ["127.0.0.1"]
            if store is not None:
                own = addresses if local else [*outward_addresses(), socket.gethostname()]
                where = {
                    "host": host_id(),
                    "port": self._coordinator.port,
                    "token": token,
                    "addresses": own,
                }
                store.set("coordinator", json.dumps(where))
            port = self._coordinator.port
        else:
            where = json.loads(store.get("coordinator"))
            port, token = int(where["port"]), str(where["token"])
            addresses = [
                *(["127.0.0.1"] if where["host"] == host_id() else []),
                *where["addresses"],
            ]
        self._socket = _connect(addresses, port, world.rank, wire.job_token(token))

    def ask(self, key: Key, ask: OperationRequest, remember: bool) -> None:
        """This rank is ready for an operation. `remember`: it is likely to come again."""
        number = None
        with self._lock:
            if remember and self._slots:
                known = (key, ask)
                number = self._known.get(known)
                if number is not None:
                    self._known.move_to_end(known)
                    return self._send({"again": number})
                if len(self._known) >= self._slots:
                    number = self._known.popitem(last=False)[1]
                else:
                    number = len(self._known)
                self._known[known] = number
            return self._send({"ask": ask.message(), "key": key, "number": number})

    def promise(self, set_id: int, parts: Parts) -> None:
        """This rank promises a round of this process set."""
        with self._lock:
            number = self._rounds.get(parts)
            if number is not None:
                return self._send({"promise": number})
            number = self._rounds[parts] = len(self._rounds)
            described = [[key, ask.message()] for key, ask in parts]
            return self._send({"promise": number, "set": set_id, "parts": described})

    def kept(self, set_id: int) -> None:
        """This rank has given all parts of the last round of this process set."""
        self._say({"kept": set_id})

    def join(self) -> None:
        """This rank has no more data."""
        self._say({"join": True})

    def stop_all(self, text: str) -> None:
        """This rank has failed in the middle of an operation, after which no rank can rely on any
        other."""
        self._say({"broken": text})

    def leave(self, patience: float, kept: list[int]) -> None:
        """This rank asks for nothing more. Rank 0 waits so many seconds for the others to say that
        as well.

        `kept`: the process sets with rounds of which this rank has given all parts.
        """
        self._say({"leave": kept})
        if self._coordinator is not None:
            self._coordinator.stop(patience)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the coordinator says, until the connection ends."""
        lines = wire.LineReader()
        while True:
            try:
                piece = self._socket.recv(2**18)
            except OSError:
                return
            if not piece:
                return
            yield from lines.feed(piece)

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        # The reading thread sees the end of the connection as well, and says so.
        with contextlib.suppress(OSError):
            self._socket.sendall(wire.encode(message))


def _connect(addresses: list[str], port: int, rank: int, token: bytes) -> socket.socket:
    def connect() -> socket.socket:
        error: OSError | None = None
        for address in addresses:
            try:
                return socket.create_connection((address, port), timeout=5.0)
            except OSError as refused:
                error = refused
        assert error is not None
        raise error

    try:
        link = wire.join(connect, token, {"rank": rank}, _PATIENCE_S)
        wire.keep_alive(link)
        return link
    except (OSError, EOFError, wire.RefusedError) as error:
        raise WorldError(
            f"rank {rank} ({socket.gethostname()}) cannot reach rank 0 at "
            f"{' or '.join(addresses)}, port {port} ({error}): workers talk to one another on "
            "ports that the system chooses; open the firewall between the hosts"
        ) from None
