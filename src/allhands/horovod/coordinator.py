"""Rank 0's thread that hears what each rank is ready for, and tells all of them what to run, in one
order.

Only ranks that have proven the world's token are heard, as lines of JSON. A rank that dies closes
its connection, so that those who wait for it hear of it at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

from allhands import wire
from allhands.horovod.matcher import Matcher
from allhands.horovod.operation_request import Key, OperationRequest
from allhands.horovod.promise_rounds import Parts

_LOOK_EVERY_S = 0.5
# A rank whose connections failed may say so before the end of the rank is seen that closed them.
_SETTLED_S = 0.3
_LONGEST = 2**26  # bytes of a line


class _Peer:
    def __init__(self, link: socket.socket, rank: int) -> None:
        self.link, self.rank = link, rank
        self.lines = wire.LineReader(_LONGEST)
        self.out = bytearray()
        self.waits_to_write = False
        # What it has asked for before, by its own numbers.
        self.known: dict[int, tuple[Key, OperationRequest]] = {}
        self.rounds: dict[int, tuple[int, Parts]] = {}  # and what it has promised before


class Coordinator:
    """The thread; `start` begins it. `port` is where ranks connect with `token`, a secret of this
    world.

    Args:
        matcher: matches the operations.
        token: the world's.
        local: all ranks are on this host; nobody else can then connect.
    """

    def __init__(self, matcher: Matcher, token: bytes, local: bool) -> None:
        self._matcher = matcher
        listener = wire.listen(local=local)
        self.port: int = listener.getsockname()[1]
        self._acceptor = wire.Acceptor("the Horovod coordinator", [listener], token, self._welcome)
        self._selector = selectors.DefaultSelector()
        self._came: list[_Peer] = []  # whom the thread does not know yet
        self._seen: set[int] = set()
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            wire.close_in_children(end)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._peers: dict[int, _Peer] = {}
        self._left: set[int] = set()
        self._failure: tuple[float, str] | None = None  # what a rank has said first, and when
        # So that equal ones of several ranks are one, and compared at once.
        self._parts: dict[Parts, Parts] = {}
        self._stopped = threading.Event()
        self.everyone_left = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="allhands-horovod-coordinator", daemon=True
        )

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()
        self._acceptor.start()

    def stop(self, patience: float) -> None:
        """End, after all ranks have said that they leave or `patience` seconds."""
        if not self.everyone_left.wait(patience):
            self._over.set()
        self._stopped.set()
        self._acceptor.close()
        self._thread.join(5.0)
        for link in (self._wake, self._wake_end, *(peer.link for peer in self._peers.values())):
            with contextlib.suppress(OSError):
                link.close()

    def _run(self) -> None:
        looked = time.monotonic()
        try:
            while not self._stopped.is_set() and not self.everyone_left.is_set():
                patience = _LOOK_EVERY_S if self._failure is None else _SETTLED_S
                for key, events in self._selector.select(patience):
                    if key.data is None:
                        self._wake.recv(4096)
                    elif events & selectors.EVENT_READ:
                        self._read(key.data)
                    else:
                        self._flush(key.data)
                while self._came:
                    self._take(self._came.pop(0))
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    looked = time.monotonic()
                    text = self._matcher.look()
                    if text:
                        lines = "".join(f"allhands: {line}\n" for line in text.splitlines())
                        os.write(2, lines.encode("utf-8", "backslashreplace"))
                if self._failure and time.monotonic() - self._failure[0] > _SETTLED_S:
                    self._settle()
                self._tell()
            if self._over.is_set():
                self._matcher.stop("rank 0 has called shutdown(), or its program is over")
                self._tell()
        except Exception as error:  # a fault of ours must not leave all ranks waiting
            self._matcher.stop(f"the coordinator in rank 0 failed: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self._tell()
            print(f"allhands: the Horovod coordinator failed: {error!r}", file=sys.stderr)

    def _welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        rank = int(said["rank"])
        if rank in self._seen or not 0 <= rank < self._matcher.size:
            raise wire.RefusedError(f"rank {rank} is here already, or none of {self._matcher.size}")
        self._seen.add(rank)
        self._came.append(_Peer(link, rank))
        self._wake_end.send(b"!")

    def _take(self, peer: _Peer) -> None:
        peer.link.setblocking(False)
        wire.keep_alive(peer.link)
        self._peers[peer.rank] = peer
        self._selector.register(peer.link, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            piece = peer.link.recv(2**18)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if not piece:
            return self._lose(peer)
        try:
            for message in peer.lines.feed(piece):
                self._hear(peer, message)
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._lose(peer)
        return None

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "again" in message:
            self._matcher.ask(peer.rank, *peer.known[int(message["again"])])
        elif "ask" in message:
            set_id, kind, name = message["key"]
            known = ((int(set_id), str(kind), str(name)), OperationRequest.read(message["ask"]))
            if message["number"] is not None:
                peer.known[int(message["number"])] = known
            self._matcher.ask(peer.rank, *known)
        elif "promise" in message:
            number = int(message["promise"])
            if "parts" in message:
                parts = tuple(
                    ((int(key[0]), str(key[1]), str(key[2])), OperationRequest.read(ask))
                    for key, ask in message["parts"]
                )
                peer.rounds[number] = (int(message["set"]), self._parts.setdefault(parts, parts))
            self._matcher.promise(peer.rank, *peer.rounds[number])
        elif "kept" in message:
            self._matcher.kept(peer.rank, int(message["kept"]))
        elif "join" in message:
            self._matcher.join(peer.rank)
        elif "broken" in message:
            self._failure = self._failure or (time.monotonic(), str(message["broken"]))
        elif "leave" in message:
            self._settle()
            self._left.add(peer.rank)
            for number in message["leave"]:
                self._matcher.kept(peer.rank, int(number))
            self._matcher.leave(peer.rank, "has called shutdown(), or its program is over")
            if len(self._left) == self._matcher.size:
                self.everyone_left.set()

    def _settle(self) -> None:
        """End everything, if a rank has said that an operation failed."""
        if self._failure is not None:
            self._matcher.fail(self._failure[1])
            self._failure = None

    def _lose(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.link)
        peer.link.close()
        if self._peers.pop(peer.rank, None) is not None:
            self._matcher.leave(
                peer.rank, "is gone without a word: killed, crashed, or its host is down"
            )
            self._left.add(peer.rank)

    def _tell(self) -> None:
        for ranks, message in self._matcher.take():
            data = wire.encode(message)
            for rank in ranks:
                if rank in self._peers:
                    self._peers[rank].out += data
        for peer in list(self._peers.values()):
            if peer.out:
                self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.link.send(peer.out)
        except BlockingIOError:
            sent = 0
        except OSError:
            return self._lose(peer)
        del peer.out[:sent]
        if bool(peer.out) != peer.waits_to_write:
            peer.waits_to_write = bool(peer.out)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.waits_to_write else 0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(peer.link, events, peer)
        return None
