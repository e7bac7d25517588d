"""A worker's two connections on the server: what comes in is done by one thread, what goes out by
another."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import defaultdict
from typing import Any

import torch
from safetensors.torch import load, save

from allhands import wire
from allhands.errors import UserError
from allhands.kvstore.chunk_compression import ChunkCompressor, take_values
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.monitored_socket import MonitoredSocket
from allhands.kvstore.parts import Meta
from allhands.kvstore.shard import Shard
from allhands.kvstore.shard_state import state_of
from allhands.kvstore.shared_memory import SharedMemory, receive_file, send_file
from allhands.kvstore.table_rounds import unpack_rows
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

# What a worker may say before it knows that the servers have gone back to a snapshot.
_ANY_TIME = ("mirrored", "snapshots", "back", "bye")


class WorkerSession:
    """One worker, from its second connection to its end.

    Args:
        shard: what the server holds.
        rank: the worker's number.
        up: what the worker sends on.
        down: what it reads from.
        about: what the worker is, for messages: its host and process.
        local: both ends map the same memory.
    """

    def __init__(
        self,
        shard: Shard,
        rank: int,
        up: socket.socket,
        down: socket.socket,
        about: str,
        local: bool,
    ) -> None:
        self.shard, self.rank, self.about, self.local = shard, rank, about, local
        self.incoming = MonitoredSocket(up)
        self.again = False
        # The last time that this worker went back to a snapshot with the servers.
        self.occasion = ""
        self.life = ""  # of the worker process; another one after it was started again
        self._up, self._down = up, down
        self._out: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        # None: a step that was refused, whose pushes are dropped.
        self._metas: dict[int, Meta | None] = {}
        self._regions: dict[int, torch.Tensor] = {}
        # Of the worker's own, which may not be written to.
        self._buffers: dict[int, torch.Tensor] = {}
        self._left = False
        self._closed = False
        # By size: with one list, those below the last pile up.
        self._pool: dict[int, list[torch.Tensor]] = defaultdict(list)
        # Versions that went out, where they are compressed.
        self._given: dict[int, tuple[int, int]] = {}
        # What the worker has, where each one has something else.
        self._sent: dict[int, torch.Tensor] = {}

    def start(self) -> None:
        """Begin to read and to write."""
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"worker-{self.rank}", daemon=True).start()

    def mute(self) -> None:
        """Take the worker's end for no loss from now on."""
        self._closed = True

    def end(self) -> None:
        """Close both connections."""
        self._closed = True
        self._out.put(None)
        for link in (self._up, self._down):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def end_soon(self) -> None:
        """Close both connections once the worker had a moment to read why."""
        timer = threading.Timer(1.0, self.end)
        timer.daemon = True
        timer.start()

    # ------------------------------------------------------------------ to the worker

    def tell(self, fields: dict[str, Any]) -> None:
        """A control message."""
        self._out.put([message(fields)])

    def reply(self, request: int, **fields: Any) -> None:
        """The answer to a request."""
        self.tell({"op": "reply", "id": request, **fields})

    def give(self, chunk: Chunk) -> None:
        """Send a chunk's value. The chunk's lock is held."""
        if self._closed:
            return
        header = {"chunk": chunk.number, "round": chunk.version}
        if chunk.down is not None:
            try:
                data, flags = (
                    self._compress(chunk)
                    if self.shard.synchronous
                    else self._change(chunk, chunk.down)
                )
            except UserError as error:
                self.tell({"op": "failed", "error": str(error)})
                return
            self._out.put([pack(Kind.VALUE, flags, nbytes=data.nbytes, **header), data])
        elif self.local and self.shard.synchronous:
            self._out.put([pack(Kind.VALUE, Flag.SHARED, **header)])
        elif self.local and chunk.number in self._regions:
            self._regions[chunk.number].copy_(chunk.weights)
            self._out.put([pack(Kind.VALUE, Flag.SHARED | Flag.OWN, **header)])
        else:
            # In sync the value stays as it is until this worker has pushed again.
            data = chunk.weights if self.shard.synchronous else chunk.weights.clone()
            self._out.put([pack(Kind.VALUE, nbytes=data.nbytes, **header), data])

    def _compress(self, chunk: Chunk) -> tuple[torch.Tensor, Flag]:
        """What the last round has changed, the same for all workers; the whole value for one that
        has not the one before."""
        had = self._given.get(chunk.number) == (chunk.version - 1, chunk.outside)
        self._given[chunk.number] = (chunk.version, chunk.outside)
        if had and chunk.encoded is not None:
            return chunk.encoded, Flag.COMPRESSED
        assert chunk.sent is not None
        return chunk.sent.clone(), Flag.NONE

    def _change(self, chunk: Chunk, down: ChunkCompressor) -> tuple[torch.Tensor, Flag]:
        """What has changed since this worker's last value: without rounds, each worker has another
        one."""
        sent = self._sent.get(chunk.number)
        if sent is None:
            self._sent[chunk.number] = chunk.weights.clone()
            return chunk.weights.clone(), Flag.NONE
        data = down.values(chunk.weights, sent, True, chunk.key)
        take_values(down.codec, data, sent, True)
        return data, Flag.COMPRESSED

    def give_rows(self, request: int, rows: torch.Tensor) -> None:
        """The rows that a request asked for."""
        data = rows.contiguous()
        self._out.put([pack(Kind.ROWS, meta=request, nbytes=data.nbytes), data])

    def finished(self, meta: Meta, workers: int, staleness: int) -> None:
        """All chunks of a step are done."""
        if meta.worker is self:
            self._metas = {number: one for number, one in self._metas.items() if one is not meta}
        self.tell({"op": "done", "step": meta.step, "workers": workers, "staleness": staleness})

    def _write(self) -> None:
        try:
            while (parts := self._out.get()) is not None:
                for part in parts:
                    if isinstance(part, bytes):
                        self._down.sendall(part)
                    elif isinstance(part, torch.Tensor):
                        self._down.sendall(raw(part))
                    else:
                        send_file(self._down, part)
        except OSError:
            pass  # the reading thread sees the end too, and says so
        finally:
            self._down.close()

    # ------------------------------------------------------------------ from the worker

    def _read(self) -> None:
        header = bytearray(HEADER_BYTES)
        try:
            while True:
                frame = read_header(self.incoming, header)
                try:
                    self._handle(frame)
                except UserError as error:
                    self.tell({"op": "failed", "error": str(error)})
            # not reached
        except (EOFError, OSError):
            why = (
                "its connection ended without a goodbye: it was killed, it crashed, or its host "
                "or network is down"
            )
        except Exception as error:  # whatever one worker sends, the others go on
            why = f"it sent what this server does not understand ({type(error).__name__}: {error})"
        if not self._left and not self._closed:
            self.shard.gone(self, f"worker {self.rank} ({self.about}) is lost: {why}", polite=False)
        self.end()
        self._up.close()

    def _handle(self, frame: Frame) -> None:
        shard = self.shard
        if frame.kind == Kind.BEAT:
            return
        if frame.kind == Kind.MESSAGE:
            self._message(read_message(self.incoming, frame.nbytes))
        elif self._is_behind():
            read_bytes(self.incoming, frame.nbytes, LONGEST_ROWS)
        elif frame.kind == Kind.PUSH:
            chunk = shard.parts[frame.chunk]
            meta = self._metas[frame.meta]
            values, buffer = self._values(frame, chunk)
            release = (
                (lambda: self._pool[buffer.nbytes].append(buffer))
                if buffer is not None
                else _nothing
            )
            if meta is None:
                release()
                return
            room = self._regions[frame.chunk] if frame.flags & Flag.OWN else None
            shard.push(
                chunk, frame.round, meta, values, release, bool(frame.flags & Flag.WANTED), room
            )
        elif frame.kind == Kind.PULL:
            shard.pull(self, shard.parts[frame.chunk], frame.round)
        elif frame.kind == Kind.INIT:
            chunk = shard.parts[frame.chunk]
            shard.initialise(chunk, self._values(frame, chunk)[0])
        elif frame.kind == Kind.PUSH_ROWS:
            table, meta = shard.parts[frame.chunk], self._metas[frame.meta]
            ids, rows = unpack_rows(
                read_bytes(self.incoming, frame.nbytes, LONGEST_ROWS), table.table, True
            )
            if meta is not None:
                shard.push(table, frame.round, meta, (ids, rows), _nothing, wanted=False)
        elif frame.kind == Kind.PULL_ROWS:
            table = shard.parts[frame.chunk]
            ids, _ = unpack_rows(
                read_bytes(self.incoming, frame.nbytes, LONGEST_ROWS), table.table, False
            )
            shard.pull(self, table, frame.round, (frame.meta, ids))
        elif frame.kind == Kind.STATE:
            shard.load(load(bytes(read_bytes(self.incoming, frame.nbytes, LONGEST_STATE))))
            self.reply(frame.meta)
        else:
            raise FrameError(f"a worker does not send {frame.kind.name}")

    def _is_behind(self) -> bool:
        """What comes is of the time before the servers went back to a snapshot, and is to be
        dropped."""
        return self.shard.recovery is not None and self.occasion != self.shard.recovery.occasion

    def _values(self, frame: Frame, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values of a push; and the buffer that they lie in, where it is to be used again."""
        if frame.flags & Flag.SHARED:
            return (self._buffers if frame.flags & Flag.OWN else self._regions)[frame.chunk], None
        expected = chunk.weights.nbytes
        codec = None
        if frame.flags & Flag.COMPRESSED:
            codec = self.shard.push_codec
            if codec is None:
                raise FrameError("a compressed push, but no compression was set")
            expected = codec.nbytes(len(chunk.weights))
        if frame.nbytes != expected:
            raise FrameError(f"a push of {frame.nbytes} bytes for a chunk of {expected}")
        if codec is not None:
            data = torch.empty(expected, dtype=torch.uint8)
            wire.read_into(self.incoming, raw(data))
            values = torch.empty(len(chunk.weights))
            codec.decode(data, values)
            return values.to(chunk.weights.dtype), None
        free = self._pool[expected]
        buffer = free.pop() if free else torch.empty(expected, dtype=torch.uint8)
        values = buffer.view(chunk.weights.dtype)
        wire.read_into(self.incoming, raw(values))
        return values, buffer

    def _message(self, said: dict[str, Any]) -> None:
        shard, request = self.shard, said.get("id", 0)
        if self._is_behind() and said["op"] not in _ANY_TIME:
            return
        try:
            match said["op"]:
                case "declare":
                    placed = shard.declare(said["keys"], self.rank, said["complete"])
                    shard.copied()
                    self.reply(request, placed=placed)
                case "create":
                    versions = shard.create(said["forms"])
                    shard.copied()
                    self.reply(request, versions=versions)
                case "ready":
                    shard.wait_initialised(self, request, set(said["chunks"]))
                case "region":
                    self._region(said)
                    self.reply(request)
                case "block":
                    memory, chunks = shard.block(said["chunk"])
                    self._out.put(
                        [message({"op": "reply", "id": request, "chunks": chunks}), memory.fd]
                    )
                case "optimizer":
                    shard.set_optimizer(said["name"], said["groups"])
                    shard.copied()
                    self.reply(request)
                case "compression":
                    shard.set_compression(said["push"], said["pull"])
                    shard.copied()
                    self.reply(request)
                case "step":
                    meta = Meta(
                        self,
                        said["step"],
                        float(said["weight"]),
                        said["expected"],
                        said["groups"],
                        said["clip"],
                        said["chunks"],
                        bool(said["idle"]),
                    )
                    self._metas[said["meta"]] = None
                    shard.announce(meta)
                    self._metas[said["meta"]] = meta
                case "commit":
                    shard.commit(said["step"], float(said["scale"]))
                case "settled":  # all that came before it has been taken
                    self.reply(request)
                case "barrier":
                    shard.barrier(self, request, int(said.get("number", 0)))
                case "waits":
                    shard.long_wait(self, said)
                case "versions":
                    self.reply(request, versions=shard.versions())
                case "join":
                    self.reply(request, late=shard.join(self, said["begins"]))
                case "state":
                    data = save(state_of(shard))
                    self._out.put([pack(Kind.STATE, meta=request, nbytes=len(data)) + data])
                case "snapshots":
                    self.reply(
                        request, steps=[] if shard.recovery is None else shard.recovery.steps()
                    )
                case "mirrored":
                    # Beside this thread, which hears meanwhile that the worker lives.
                    threading.Thread(
                        target=self._fetch,
                        args=(request, str(said["occasion"])),
                        name="fetch",
                        daemon=True,
                    ).start()
                case "back":
                    if shard.recovery is None:
                        raise UserError("the servers of this store cannot come back")
                    shard.recovery.go_back(shard, self, request, said)
                case "bye":
                    self._left = True
                    shard.gone(self, "it has left", polite=True)
                    shard.has_left(self.rank)
                case other:
                    raise FrameError(f"there is no operation {other!r}")
        except UserError as error:
            if "id" not in said:
                raise
            self.reply(request, error=str(error))

    def _fetch(self, request: int, occasion: str) -> None:
        self.reply(
            request,
            whole=self.shard.recovery is not None
            and self.shard.recovery.from_copy(self.shard, occasion),
        )

    def _region(self, said: dict[str, Any]) -> None:
        """Memory of the worker's, in which its pushes lie."""
        memory = SharedMemory(said["nbytes"], receive_file(self._up))
        memory.close_file()
        for number, region, buffer in said["chunks"]:
            weights = self.shard.parts[number].weights
            self._regions[number] = memory.view(region, len(weights), weights.dtype)
            if buffer is not None:
                self._buffers[number] = memory.view(buffer, len(weights), weights.dtype)


def _nothing() -> None:
    """A value in shared memory needs no buffer back."""
