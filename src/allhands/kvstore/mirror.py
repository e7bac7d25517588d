"""What a server sends to the next one, which keeps a copy of all that it holds: the input of each
update, before it is answered.

Server i connects to server i + 1 (the last one to server 0), proves itself as workers do, and sends
control messages, each with a payload, which may be empty: raw numbers, or a safetensors file. The
other side answers each one when it has it, and then applies it: the same update of the same numbers
gives the same numbers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from allhands import wire
from allhands.errors import WorldError
from allhands.kvstore.server_sockets import connect
from allhands.kvstore.shard_state import load_whole, settings_of
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

# Seconds for which a server that was started again looks for the one that has its copy.
_LONGEST_LOOK = 10.0
_LOOK_EVERY = 0.3

Find = Callable[[int], Mapping[str, Any]]
Ticket = tuple[socket.socket, int]


class Mirror:
    """One shard's connection to the server that keeps its copy.

    While there is none, the training goes on without a copy, and a new one is made as soon as the
    other server is there.

    Args:
        shard: what is copied.
        store: the number of the store in the job.
        token: the job's.
        find: gives a server's present announcement.
        patience: seconds for which the other server may owe an answer. Workers that wait for it
            must not seem lost meanwhile.
    """

    def __init__(self, shard: Any, store: int, token: bytes, find: Find, patience: float) -> None:
        self._patience = patience
        self.shard, self.target = shard, (shard.number + 1) % shard.servers
        self._store, self._token, self._find = store, token, find
        self._up: socket.socket | None = None
        self._down: socket.socket | None = None
        # The order of what is sent; taken after a chunk's or a table's lock.
        self._sending = threading.RLock()
        self._changed = threading.Condition()
        self._sent = self._taken = 0
        # The parts that the other side has, and how often they had been set by no round.
        self._has: dict[int, int] = {}
        self._known: set[int] = set()  # those that the other side has been told of
        self._answer: tuple[dict[str, Any], bytes] | None = None
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._alone = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the connection

    def start(self) -> bool:
        """Make a copy, and another one whenever it was lost; False where that is being done
        already."""
        if self._thread is not None:
            return False
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
        self._thread.start()
        return True

    def close(self, finished: bool = False) -> None:
        """End the connection; where the store is `finished`, the other server forgets the copy."""
        self._closed.set()
        self._tried.set()
        if finished:
            self._wait(self._say({"op": "end"}))
        self._lose(None)

    def _keep(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            if self._up is None:
                try:
                    self._connect(anew=True)
                    self._fill()
                except (OSError, EOFError, wire.RefusedError, WorldError) as error:
                    self._lose(None)
                    if time.monotonic() - began > self._patience:
                        self._tell(f"it cannot be reached ({error or 'no answer'})")
                if self._up is not None and self._alone:
                    self._alone = False
                    print(
                        f"allhands: server {self.target} keeps a copy of server "
                        f"{self.shard.number} again",
                        flush=True,
                    )
            if self._up is not None or time.monotonic() - began > self._patience:
                self._tried.set()
            self._closed.wait(_LOOK_EVERY)

    def _connect(self, anew: bool) -> None:
        """Connect; with `anew`, for a copy that begins with nothing."""
        said = {"mirror": self.shard.number, "store": self._store, "rules": self.shard.rules}
        up, down, _ = connect(self._find(self.target), self._token, said, patience=self._patience)
        for link in (up, down):
            link.settimeout(self._patience)
        with self._sending:
            self._has.clear()
            self._known.clear()
            with self._changed:
                self._sent = self._taken = 0
                self._up, self._down = up, down
            if anew:  # before a round is sent
                self._say({"op": "fill"})
        threading.Thread(target=self._read, args=(up, down), name="mirror", daemon=True).start()

    def _read(self, up: socket.socket, down: socket.socket) -> None:
        header = bytearray(HEADER_BYTES)
        waited: int | None = None
        why = "its connection ended"
        while True:
            try:
                frame = read_header(down, header)
                if frame.kind == Kind.MESSAGE:
                    said = read_message(down, frame.nbytes)
                    self._answer = (
                        said,
                        bytes(read_bytes(down, read_header(down, header).nbytes, LONGEST_STATE)),
                    )
                elif frame.kind != Kind.BEAT:
                    raise FrameError(f"it sent {frame.kind.name}")
                with self._changed:
                    if self._up is not up:
                        return  # there is another connection, whose answers are counted anew
                    self._taken += 1
                    self._changed.notify_all()
                waited = None
            except TimeoutError:
                if waited == self._taken and self._sent > self._taken:
                    why = f"it has not answered within {self._patience:.0f} s"
                    break
                waited = self._taken if self._sent > self._taken else None
            except (OSError, EOFError):
                break
            except FrameError as error:
                why = str(error)
                break
        self._lose(up, why)

    def _lose(self, up: socket.socket | None, why: str = "") -> None:
        """Let go of a connection, if it is still the present one."""
        with self._changed:
            if self._up is None or (up is not None and up is not self._up):
                return
            for link in (self._up, self._down):
                assert link is not None
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()
            self._up = self._down = None
            self._changed.notify_all()
        if why and not self._closed.is_set():
            self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._alone and self.shard.members.everyone():  # else the job ends
            self._alone = True
            print(
                f"allhands: server {self.shard.number} goes on without a copy, because server "
                f"{self.target}, which keeps it, is "
                f"lost: {why}; there is another one once that server is back",
                flush=True,
            )

    def _say(self, fields: Mapping[str, Any], payload: torch.Tensor | bytes = b"") -> Ticket | None:
        """Send something; what to wait for, or None without a connection."""
        with self._sending:
            up = self._up
            if up is None:
                return None
            self._sent += 1
            ticket = up, self._sent
            body = raw(payload) if isinstance(payload, torch.Tensor) else memoryview(payload)
            try:
                up.sendall(message(dict(fields)) + pack(Kind.PUSH, nbytes=len(body)))
                up.sendall(body)
            except OSError as error:
                self._lose(up, str(error))
                return None
            return ticket

    def _wait(self, ticket: Ticket | None) -> None:
        """Until the other side has it, or is lost."""
        if ticket is not None:
            up, number = ticket
            with self._changed:
                self._changed.wait_for(lambda: self._up is not up or self._taken >= number)

    # ------------------------------------------------------------------ what is copied

    def begin(self, part: Any, options: dict[str, Any] | None, workers: int) -> Ticket | None:
        """Send what a round is about to apply; None where the whole part is to be sent afterwards.
        The part's lock is held."""
        with self._sending:
            if self._has.get(part.number) != part.outside:
                return None
            said = {
                "op": "round",
                "part": part.number,
                "options": options,
                "workers": workers,
                "square": part.square,
            }
            return self._say(said, part.payload())

    def settle(self, part: Any, ticket: Ticket | None) -> None:
        """Wait until the other side has a round, or the whole part. The part's lock is held."""
        self._wait(self._send_part(part) if ticket is None else ticket)

    def _send_part(self, part: Any) -> Ticket | None:
        with self._sending:
            if self._up is None:
                return None
            if part.number not in self._known:
                self._tell_settings()
            fields, tensors = part.whole()
            ticket = self._say({"op": "part", **fields}, save(tensors))
            if ticket is not None:
                self._has[part.number] = part.outside
            return ticket

    def settings(self) -> None:
        """Send what the workers have set, and wait. No lock is held."""
        self._tried.wait(2 * self._patience)
        self._wait(self._tell_settings())

    def _tell_settings(self) -> Ticket | None:
        with self._sending:
            with self.shard._lock:
                fields = settings_of(self.shard)
            self._known = {form[0] for form in fields["forms"]}
            return self._say({"op": "settings", **fields})

    def refresh(self) -> None:
        """Send settings, and all parts that the other side has not, or that were set by no round,
        and wait. No lock is held."""
        self._tried.wait(2 * self._patience)
        self._refresh()

    def _refresh(self) -> None:
        self._wait(self._tell_settings())
        for part in list(self.shard.parts.values()):
            with part.lock:
                if self._has.get(part.number) != part.outside:
                    self._wait(self._send_part(part))

    def _fill(self) -> None:
        """Send everything to a new connection; rounds go on meanwhile."""
        self._refresh()
        self._wait(self._say({"op": "whole"}))

    # ------------------------------------------------------------------ back

    def fetch(self) -> bool:
        """Take everything from the copy, after this server was started again; whether there was a
        whole one."""
        end = time.monotonic() + _LONGEST_LOOK
        while True:
            try:
                self._connect(anew=False)
                break
            except (OSError, EOFError, wire.RefusedError, WorldError):
                if time.monotonic() > end:
                    return False
                time.sleep(_LOOK_EVERY)
        self._answer = None
        self._wait(self._say({"op": "fetch"}))
        found = self._answer
        if found is None or not found[0]["whole"]:
            self._lose(None)
            return False
        load_whole(self.shard, (found[0], load(found[1])))
        self._has |= {number: part.outside for number, part in self.shard.parts.items()}
        self._known = set(self._has)
        self._tried.set()
        return True
