"""A worker's two connections to one server: one thread sends by priority, another takes what
comes."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load

from allhands import wire
from allhands.comm.codecs import Codec
from allhands.errors import AllhandsError, UserError, WorldError
from allhands.kvstore.chunk_compression import take_values
from allhands.kvstore.credentials import token_from
from allhands.kvstore.server_sockets import connect
from allhands.kvstore.shared_memory import ChunkOffsets, SharedMemory, copy, receive_file, send_file
from allhands.kvstore.wait_state import PendingReply, WaitState
from allhands.kvstore.wire_frames import (
    HEADER_BYTES,
    LONGEST_ROWS,
    LONGEST_STATE,
    Flag,
    Frame,
    FrameError,
    Kind,
    message,
    pack,
    raw,
    read_bytes,
    read_header,
    read_message,
)

BEAT_EVERY = 1.0
# Priorities of what goes before, and after, everything that waits to be sent.
FIRST = 1 << 60
LAST = -FIRST


class ServerLink:
    """One server, as a worker sees it.

    Attributes:
        number: which server.
        local: both ends map the same memory.
        again: the others went on without this worker, which has come again.
        versions: of the chunks that this worker has.
    """

    def __init__(
        self,
        number: int,
        where: Mapping[str, Any],
        wait_state: WaitState,
        said: Mapping[str, Any],
        transport: str,
    ) -> None:
        self.transport = transport
        self.comes_back = False
        self.number, self.where, self.wait_state = number, where, wait_state
        self.local = False
        self.again = False
        self.versions: dict[int, int] = {}
        self.targets: dict[int, tuple[torch.Tensor, PendingReply]] = {}
        self.down_codec: Codec | None = None
        # What this worker has, where changes come compressed.
        self.base: dict[int, torch.Tensor] = {}
        self.adds = True
        self.squares: dict[int, dict[int, float]] = {}
        self.done: dict[int, dict[str, Any] | None] = {}  # of the steps that are waited for
        self._requests = itertools.count(1)
        self._answers: dict[int, PendingReply] = {}
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._regions: dict[int, torch.Tensor] = {}
        # Where in this process the chunks of `KVStore.buffer` begin.
        self._buffers: dict[int, int] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self._welcome = PendingReply(1)
        self._closing = False
        self._ending = threading.Event()
        self._connect(said)

    @property
    def shares(self) -> bool:
        """Whether memory is shared with the server."""
        return bool(self._regions)

    @property
    def name(self) -> str:
        return f"server {self.number} (host {self.where['host']}, process {self.where['pid']})"

    # ------------------------------------------------------------------ connecting

    def _connect(self, said: Mapping[str, Any]) -> None:
        try:
            self._up, self._down, self.local = connect(
                self.where, token_from(os.environ), said, self.transport
            )
        except (wire.RefusedError, OSError, EOFError) as error:
            raise WorldError(
                f"{self.name} at {self.where['address']}:{self.where['port']} cannot be used: "
                f"{error or 'no answer'}"
            ) from error
        self._threads = [
            threading.Thread(target=work, name=f"kvstore-{self.number}", daemon=True)
            for work in (self._send, self._read, self._beat)
        ]
        for thread in self._threads:
            thread.start()
        self.wait_state.wait(
            lambda: self._welcome.left == 0,
            lambda: f"{self.name} has not answered",
            30.0,
            self.number,
        )
        answer = self._welcome.answer
        if answer["refused"] or answer["failed"]:
            self.abandon()
        if answer["refused"]:
            raise UserError(answer["refused"])
        if answer["failed"]:
            raise WorldError(answer["failed"])
        self.again = bool(answer["again"])

    # ------------------------------------------------------------------ sending

    def put(self, *parts: Any, priority: int = 0) -> None:
        """Queue bytes, tensors or functions that give such; larger priorities go first."""
        self._queue.put((-priority, next(self._order), parts))

    def first(self, *parts: Any) -> None:
        """Queue something before everything that waits."""
        self.put(*parts, priority=FIRST)

    def ask(self, op: str, fd: int | None = None, **fields: Any) -> Any:
        """Send a request, and wait for its answer.

        Raises:
            UserError: the server refuses it.
        """
        return self.answer(self.begin(op, fd, **fields), op)

    def begin(
        self, op: str, fd: int | None = None, priority: int = FIRST, **fields: Any
    ) -> PendingReply:
        """Send a request."""
        number, pending = self.expect()
        handed = () if fd is None else (lambda: send_file(self._up, fd),)
        self.put(message({"op": op, "id": number, **fields}), *handed, priority=priority)
        return pending

    def expect(self) -> tuple[int, PendingReply]:
        """The number of a request, and what waits for its answer."""
        pending = PendingReply(1)
        with self.wait_state.changed:
            number = next(self._requests)
            self._answers[number] = pending
        return number, pending

    def answer(
        self, pending: PendingReply, what: str, report: Callable[[], None] | None = None
    ) -> Any:
        """Wait for an answer; `report` is that of `WaitState.wait`."""
        self.wait_state.wait(
            lambda: pending.left == 0,
            lambda: f"{self.name} has not answered to '{what}'",
            report=report,
        )
        found = pending.answer
        if isinstance(found, dict) and found.get("error"):
            raise UserError(found["error"])
        if isinstance(found, dict) and found.get("lost"):
            raise WorldError(found["lost"])
        return found

    def push(
        self,
        chunk: int,
        number: int,
        meta: int,
        values: torch.Tensor,
        wanted: bool,
        priority: int,
        encoded: torch.Tensor | None,
        copies: bool = False,
        travels: bool = False,
    ) -> None:
        """Queue a chunk; `values` must stay as they are until its value has come, unless it
        `copies` them before it returns.

        `encoded`: what is sent instead, in fewer bits. `travels`: not through shared memory, where
        the next push would overwrite it before it was read.
        """
        flags = Flag.WANTED if wanted else Flag.NONE
        region = None if travels else self._regions.get(chunk)
        if encoded is not None:
            self.put(
                pack(Kind.PUSH, flags | Flag.COMPRESSED, chunk, meta, number, encoded.nbytes),
                encoded,
                priority=priority,
            )
        elif region is not None and not copies and self._buffers.get(chunk) == values.data_ptr():
            self.put(
                pack(Kind.PUSH, flags | Flag.SHARED | Flag.OWN, chunk, meta, number),
                priority=priority,
            )
        elif region is not None:
            header = pack(Kind.PUSH, flags | Flag.SHARED, chunk, meta, number)
            if copies:  # the last round is closed, so that nobody reads there any more
                copy(region, values)
                self.put(header, priority=priority)
            else:
                self.put(lambda: copy(region, values), header, priority=priority)
        else:
            values = values.clone() if copies else values
            self.put(
                pack(Kind.PUSH, flags, chunk, meta, number, values.nbytes),
                values,
                priority=priority,
            )

    def _send(self) -> None:
        try:
            while True:
                _, _, parts = self._queue.get()
                for part in parts:
                    if part is None:
                        return
                    if callable(part):
                        part()
                    else:
                        self._up.sendall(raw(part) if isinstance(part, torch.Tensor) else part)
                del part, parts  # while this waits, it must not keep the caller's memory
        except OSError:
            pass  # the reading thread sees the end too, and says so
        except AllhandsError as error:
            self.wait_state.fail(error)

    def _beat(self) -> None:
        beat = pack(Kind.BEAT)
        while not self._ending.wait(BEAT_EVERY):
            self.first(beat)

    # ------------------------------------------------------------------ memory of both

    def share(self, memory: SharedMemory, chunks: Mapping[int, ChunkOffsets]) -> None:
        """Map memory with the server for these chunks."""
        if not self.local or not chunks:
            return
        places = [[number, place.region, place.buffer] for number, place in chunks.items()]
        self.ask("region", memory.fd, nbytes=memory.nbytes, chunks=places)
        for number, place in chunks.items():
            self._regions[number] = memory.view(place.region, place.count, place.dtype)
            if place.buffer is not None:
                self._buffers[number] = memory.view(
                    place.buffer, place.count, place.dtype
                ).data_ptr()
        for number in chunks:
            if number not in self._shared:
                told = self.ask("block", chunk=number)
                block = told["memory"]
                for other, start, count in told["chunks"]:
                    if other in chunks:
                        self._shared[other] = block.view(start, count, chunks[other].dtype)

    # ------------------------------------------------------------------ taking

    def _read(self) -> None:
        header = bytearray(HEADER_BYTES)
        try:
            while True:
                self._take(read_header(self._down, header))
        except (EOFError, OSError):
            self._ended()
        except (FrameError, ValueError, KeyError, TypeError) as error:
            self.wait_state.fail(
                WorldError(
                    f"{self.name} sent what is not understood: {type(error).__name__}: {error}"
                )
            )

    def _ended(self) -> None:
        if self._closing:
            return
        if not self.comes_back:
            self.wait_state.fail(WorldError(f"{self.name} is gone: its connection ended"))
            return
        with self.wait_state.changed:
            self.wait_state.broken.add(self.number)
            self.wait_state.changed.notify_all()

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.VALUE:
            self._value(frame)
        elif frame.kind == Kind.MESSAGE:
            self._told(read_message(self._down, frame.nbytes))
        elif frame.kind in (Kind.ROWS, Kind.STATE):
            data = read_bytes(
                self._down, frame.nbytes, LONGEST_ROWS if frame.kind == Kind.ROWS else LONGEST_STATE
            )
            self._answered(frame.meta, load(bytes(data)) if frame.kind == Kind.STATE else data)
        else:
            raise FrameError(f"a server does not send {frame.kind.name}")

    def _value(self, frame: Frame) -> None:
        found = self.targets.pop(frame.chunk, None)
        if found is None:  # it was asked for before the servers went back to a snapshot
            read_bytes(self._down, frame.nbytes, LONGEST_ROWS)
            return
        target, pending = found
        with torch.no_grad():
            if frame.flags & Flag.SHARED:
                copy(
                    target, (self._regions if frame.flags & Flag.OWN else self._shared)[frame.chunk]
                )
            elif frame.flags & Flag.COMPRESSED:
                assert self.down_codec is not None
                data = torch.empty(self.down_codec.nbytes(len(target)), dtype=torch.uint8)
                if frame.nbytes != data.nbytes:
                    raise FrameError(
                        f"a value of {frame.nbytes} bytes for a chunk of {data.nbytes}"
                    )
                wire.read_into(self._down, raw(data))
                base = self.base.setdefault(frame.chunk, torch.zeros_like(target))
                take_values(self.down_codec, data, base, self.adds)
                target.copy_(base)
            else:
                if frame.nbytes != target.nbytes:
                    raise FrameError(
                        f"a value of {frame.nbytes} bytes for a chunk of {target.nbytes}"
                    )
                wire.read_into(self._down, raw(target))
                if self.down_codec is not None:
                    self.base[frame.chunk] = target.clone()
        with self.wait_state.changed:
            self.versions[frame.chunk] = frame.round
            pending.left -= 1
            if pending.left == 0:
                self.wait_state.changed.notify_all()

    def _told(self, said: dict[str, Any]) -> None:
        op = said["op"]
        if op == "reply":
            if "chunks" in said:
                said["memory"] = SharedMemory(fd=receive_file(self._down))
            self._answered(said["id"], said)
            return
        with self.wait_state.changed:
            if op == "welcome":
                self._welcome.answer, self._welcome.left = said, 0
            elif op == "squares":
                self.squares[said["step"]] = {
                    int(number): float(square) for number, square in said["squares"]
                }
            elif op == "done":
                if said["step"] in self.done:
                    self.done[said["step"]] = said
            elif op == "failed":
                self.wait_state.failure = self.wait_state.failure or _error(said["error"])
            self.wait_state.changed.notify_all()

    def _answered(self, number: int, answer: Any) -> None:
        with self.wait_state.changed:
            pending = self._answers.pop(number, None) or PendingReply(1)
            pending.answer, pending.left = answer, 0
            self.wait_state.changed.notify_all()

    def forget(self) -> None:
        """Drop all that is queued or waited for: the servers go back to a snapshot."""
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self.forget_answers()

    def forget_answers(self) -> None:
        """Drop what has come, and what is waited for, but for answers to requests."""
        with self.wait_state.changed:
            self.targets.clear()
            self.squares.clear()
            self.done.clear()
            self.base.clear()

    def abandon(self) -> None:
        """Let go of a server that is gone."""
        self._closing = True
        self._ending.set()
        self.put(None)
        self._shut_down()
        for link in (self._up, self._down):
            link.close()

    def _shut_down(self) -> None:
        """End what the threads are doing with the connections, which stay open."""
        for link in (self._up, self._down):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Say goodbye, and close both connections once that is sent."""
        if self._closing:
            return
        self._closing = True
        self._ending.set()
        self.put(message({"op": "bye"}), None, priority=LAST - 1)
        self._threads[0].join(5.0)  # it has ended already where the server is gone
        self._shut_down()
        # A thread that is in the midst of torch when the interpreter ends takes the process down
        # with it.
        for thread in self._threads:
            thread.join(5.0)
        for link in (self._up, self._down):
            link.close()


def _error(text: str) -> AllhandsError:
    lost = " is lost: " in text or "started again" in text
    return WorldError(text) if lost else UserError(text)
