"""The store's sockets beside pyzmq (sockets = 1.0): values are pushed to another process, which
sends them back.

    python benchmarks/kvstore_pyzmq.py [--pyzmq FOLDER] [--runs 21]

FOLDER holds pyzmq where this environment has none: the site-packages of another one, of the same
Python. Both contenders have what the store has: two connections over loopback, up and down; a
thread at each of their ends; chunks of at most 4 MB with a header of 28 bytes; and memory that is
there already, into which values are received. With pyzmq these are two pairs of PUSH and PULL, the
header is a frame of its own, values are sent without a copy and taken with `recv_into`; or, as the
third contender, are left in the memory of each message, out of which a server would have to
compute. The contenders take turns in one run. No token is proven, and nothing is computed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from report import machine, save_json, summarize

from allhands.kvstore.placement import CHUNK_BYTES
from allhands.kvstore.wire_frames import HEADER_BYTES, Kind, pack, read_header, read_into, unpack

# Name, bytes, and exchanges in one measurement.
SIZES = {"4 KB": (4 << 10, 200), "1 MB": (1 << 20, 20), "25 MB": (25 << 20, 2)}
CONTENDERS = ("sockets", "pyzmq", "pyzmq, values stay in its memory")


class Sockets:
    """One end of two TCP connections, as `ServerLink` and `WorkerSession` use them."""

    def __init__(self, port: int | None = None) -> None:
        self.header = bytearray(HEADER_BYTES)
        if port is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.port = self.listener.getsockname()[1]
        else:
            self.up, self.down = (
                socket.create_connection(("127.0.0.1", port)) for _ in ("up", "down")
            )
            self._at_once()

    def accept(self) -> None:
        self.down, self.up = (self.listener.accept()[0] for _ in ("up", "down"))
        self._at_once()

    def _at_once(self) -> None:
        for link in (self.up, self.down):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, number: int, values: memoryview) -> None:
        self.up.sendall(pack(Kind.PUSH, chunk=number, nbytes=len(values)))
        self.up.sendall(values)

    def take(self, chunks: list[memoryview]) -> int:
        frame = read_header(self.down, self.header)
        read_into(self.down, chunks[frame.chunk])
        return frame.chunk


class ZeroMQ:
    """The same with pyzmq; values are copied into memory that is there, or not."""

    def __init__(self, copies: bool, port: int | None = None) -> None:
        import zmq

        self.copies = copies

        self.more = zmq.SNDMORE
        context = zmq.Context.instance()
        self.up, self.down = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for link in (self.up, self.down):
            link.set_hwm(0)
        if port is None:
            self.port = self.down.bind_to_random_port("tcp://127.0.0.1")
            self.back = self.up.bind_to_random_port("tcp://127.0.0.1")
        else:
            self.up.connect(f"tcp://127.0.0.1:{port}")

    def accept(self) -> None:
        """Connections are made in pyzmq's own thread."""

    def send(self, number: int, values: memoryview) -> None:
        self.up.send(pack(Kind.PUSH, chunk=number, nbytes=len(values)), self.more)
        self.up.send(values, copy=False)

    def take(self, chunks: list[memoryview]) -> int:
        frame = unpack(self.down.recv())
        if self.copies:
            self.down.recv_into(chunks[frame.chunk])
        else:
            chunks[frame.chunk] = self.down.recv(copy=False).buffer
        return frame.chunk


def made(name: str, port: int | None = None) -> Sockets | ZeroMQ:
    return Sockets(port) if name == "sockets" else ZeroMQ(name == "pyzmq", port)


def cut(memory: bytearray) -> list[memoryview]:
    view = memoryview(memory)
    return [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]


def sender(end: Any, chunks: list[memoryview]) -> queue.SimpleQueue[int | None]:
    """A thread that sends the chunks whose numbers come."""
    numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def work() -> None:
        while (number := numbers.get()) is not None:
            end.send(number, chunks[number])

    threading.Thread(target=work, daemon=True).start()
    return numbers


def serve(name: str, pipe: Any, folder: str, total: int) -> None:
    """Send back what comes; in a process of its own."""
    sys.path.append(folder)
    end = made(name)
    pipe.send((end.port, getattr(end, "back", None)))
    end.accept()
    chunks = cut(bytearray(total))
    numbers = sender(end, chunks)
    while True:
        numbers.put(end.take(chunks))


def client(name: str, folder: str, total: int) -> tuple[Any, Callable[[], None]]:
    """The process that serves, and a push and pull with it."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(name, there, folder, total), daemon=True
    )
    process.start()
    port, back = here.recv()
    end = made(name, port)
    if back is not None:
        end.down.connect(f"tcp://127.0.0.1:{back}")
    values, targets = cut(bytearray(b"\x07") * total), cut(bytearray(total))
    numbers, come = sender(end, values), threading.Semaphore(0)

    def read() -> None:
        try:
            while True:
                end.take(targets)
                come.release()
        except (EOFError, OSError):
            return

    threading.Thread(target=read, daemon=True).start()

    def exchange() -> None:
        for number in range(len(values)):
            numbers.put(number)
        for _ in values:
            come.acquire()
        assert targets[-1][-1] == 7

    return process, exchange


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pyzmq", metavar="FOLDER", default="")
    parser.add_argument("--runs", type=int, default=21)
    options = parser.parse_args()
    sys.path.append(options.pyzmq)
    import zmq

    results: dict[str, Any] = {
        "pyzmq": zmq.pyzmq_version(),
        "ZeroMQ": zmq.zmq_version(),
        "runs": options.runs,
    }
    for size, (total, times) in SIZES.items():
        clients = {name: client(name, options.pyzmq, total) for name in CONTENDERS}
        samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for run in range(options.runs + 2):
            for name in CONTENDERS if run % 2 else reversed(CONTENDERS):
                began = time.perf_counter()
                for _ in range(times):
                    clients[name][1]()
                if run > 1:
                    samples[name].append(1e6 * (time.perf_counter() - began) / times)
        for process, _ in clients.values():
            process.kill()
            process.join()
        results[f"{size}, us"] = summarize(samples, "sockets")
        print(size, results[f"{size}, us"]["median"], results[f"{size}, us"]["ratio"], flush=True)
    save_json("pyzmq_beside_sockets", {**results, **machine()})


if __name__ == "__main__":
    main()
