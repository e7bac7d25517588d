"""The bytes of a push plus pull over TCP of this host and nothing else, which bounds what a server
over TCP can reach. For benchmarks/kvstore.py."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

PIECE_BYTES = 4_000_000


def _join(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _fill(link: socket.socket, view: memoryview) -> bool:
    """Whether `view` could be filled before the connection ended."""
    while view:
        count = link.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def _send_back(up: socket.socket, down: socket.socket) -> None:
    """Return each piece on another connection, beside the next one's arrival."""
    head = bytearray(8)
    _fill(up, memoryview(head))
    nbytes = int.from_bytes(head, "little")
    room = memoryview(bytearray(nbytes))
    come: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

    def read() -> None:
        while True:
            for start in range(0, nbytes, PIECE_BYTES):
                if not _fill(up, room[start : start + PIECE_BYTES]):
                    come.put(None)
                    return
                come.put(room[start : start + PIECE_BYTES])

    def write() -> None:
        while (piece := come.get()) is not None:
            down.sendall(piece)

    _join(read, write)


def _relay(ready: Any, workers: int) -> None:
    """A process in a server's place, which adds nothing up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.put(listener.getsockname()[1])
        pairs: dict[bytes, dict[bytes, socket.socket]] = {}
        for _ in range(2 * workers):
            link = _at_once(listener.accept()[0])
            rank, side = link.recv(1), link.recv(1)
            pairs.setdefault(rank, {})[side] = link
    _join(*(partial(_send_back, pair[b"u"], pair[b"d"]) for pair in pairs.values()))


def _at_once(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


@contextmanager
def relays(count: int, workers: int) -> Iterator[list[int]]:
    """So many processes that send back what comes; their ports."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    started = [context.Process(target=_relay, args=(ready, workers)) for _ in range(count)]
    for one in started:
        one.start()
    try:
        yield [ready.get(timeout=60) for _ in started]
    finally:
        for one in started:
            one.join(10)
            one.terminate()


class PlainTcp:
    """A worker's connections to the relays, of which each gets an equal part.

    Args:
        ports: of the relays.
        rank: this worker's.
        nbytes: of the tensors.
    """

    def __init__(self, ports: list[int], rank: int, nbytes: int) -> None:
        self._part = -(-nbytes // len(ports))
        self._links = []
        for index, port in enumerate(ports):
            up, down = (_at_once(socket.create_connection(("127.0.0.1", port))) for _ in range(2))
            for link, side in ((up, b"u"), (down, b"d")):
                link.sendall(bytes([rank]) + side)
            own = min(self._part, nbytes - index * self._part)
            up.sendall(own.to_bytes(8, "little"))
            self._links.append((up, down))

    def exchange(self, value: memoryview, out: memoryview) -> None:
        """Send `value`, and fill `out` with what comes back."""
        works: list[Callable[[], object]] = []
        for index, (up, down) in enumerate(self._links):
            part = slice(index * self._part, (index + 1) * self._part)
            works += [partial(up.sendall, value[part]), partial(_fill, down, out[part])]
        _join(*works)

    def close(self) -> None:
        for links in self._links:
            for link in links:
                link.close()
