"""The copy that a server keeps of the one before it, as `mirror` sends it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import torch
from safetensors.torch import load, save

from allhands import wire
from allhands.errors import UserError
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.shard import Shard
from allhands.kvstore.shard_state import whole_of
from allhands.kvstore.wire_frames import (
    HEADER_BYTES,
    LONGEST_STATE,
    FrameError,
    Kind,
    message,
    pack,
    raw,
    read_bytes,
    read_header,
    read_message,
)


class Copy:
    """A copy of one shard of another server.

    Args:
        number, servers, workers, rules: as of the `Shard` that is copied.

    Attributes:
        whole: all of it has come once, and each change since.
        finished: the store is not needed any more.
    """

    def __init__(self, number: int, servers: int, workers: int, rules: dict[str, Any]) -> None:
        self._made = number, servers, workers, rules
        self.shard = Shard(*self._made)
        self.whole = self.finished = False
        self._lock = threading.Lock()
        self._present: tuple[socket.socket, socket.socket] | None = None
        self._room = torch.empty(0, dtype=torch.uint8)

    def hold(self, up: socket.socket, down: socket.socket, live: Any) -> None:
        """Take what comes on a connection until it ends; `live` says who is counted on now. An
        older connection ends."""
        with self._lock:
            before, self._present = self._present, (up, down)
        _end(before)
        header = bytearray(HEADER_BYTES)
        try:
            while not self.finished:
                frame = read_header(up, header)
                if frame.kind != Kind.MESSAGE:
                    raise FrameError(f"a server does not send {frame.kind.name}")
                said = read_message(up, frame.nbytes)
                body = self._payload(up, read_header(up, header).nbytes, said)
                with self._lock:
                    if self._present != (up, down):
                        return  # the server was started again, and has another connection
                    if said["op"] == "fetch":
                        self._give(down, live())
                        continue
                    down.sendall(pack(Kind.BEAT))
                    self._apply(said, body)
        except (OSError, EOFError):
            pass  # the server is gone, and may come back for its copy
        except (UserError, FrameError, KeyError, ValueError, TypeError, RuntimeError) as error:
            self.whole = False
            print(
                f"allhands: the copy of server {self._made[0]} was lost, because what came cannot "
                f"be applied: {type(error).__name__}: {error}",
                flush=True,
            )
        finally:
            _end((up, down))

    def end(self) -> None:
        """End the connection."""
        _end(self._present)

    def _payload(self, up: socket.socket, count: int, said: dict[str, Any]) -> Any:
        """What belongs to a message; that of a chunk's round lies in memory that the next one
        overwrites."""
        if said["op"] != "round" or not isinstance(self.shard.parts[said["part"]], Chunk):
            return read_bytes(up, count, LONGEST_STATE)
        if len(self._room) < count:
            self._room = torch.empty(count, dtype=torch.uint8)
        wire.read_into(up, raw(self._room[:count]))
        return self._room[:count]

    def _apply(self, said: dict[str, Any], body: Any) -> None:
        shard = self.shard
        match said["op"]:
            case "round":
                shard.parts[said["part"]].repeat(body, said)
            case "settings":
                shard.rebuild(said)
            case "part":
                shard.parts[said["part"]].load_whole(said, load(bytes(body)))
            case "fill" | "end":
                self.shard, self.whole = Shard(*self._made), False
                self.finished = said["op"] == "end"
            case "whole":
                self.whole = True
            case other:
                raise FrameError(f"there is no operation {other!r}")

    def _give(self, down: socket.socket, live: list[int]) -> None:
        shard = self.shard if self.whole else Shard(*self._made)
        fields, tensors = whole_of(shard)
        fields["settings"]["live"] = live
        body = save(tensors)
        down.sendall(message({"whole": self.whole, **fields}) + pack(Kind.PUSH, nbytes=len(body)))
        down.sendall(body)


def _end(links: tuple[socket.socket, socket.socket] | None) -> None:
    for link in links or ():
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()
