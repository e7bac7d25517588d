"""Rank 0's thread that hears what each rank is ready for, and tells all of them what to run, in one order.

Only lines of JSON travel; nothing that arrives is run or unpickled. A rank that dies closes its connection, so that those who
wait for it hear of it at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

from allhands.horovod.checks import Ask, Key
from allhands.horovod.matcher import Matcher
from allhands.horovod.rounds import Parts
from allhands.world.links import keep_alive, listen

_LOOK_EVERY_S = 0.5
_LONGEST = 2**26  # bytes of a line; more is no rank of ours


class _Peer:
    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.rank = -1
        self.data = bytearray()
        self.out = bytearray()
        self.waits_to_write = False
        self.known: dict[int, tuple[Key, Ask]] = {}  # what it has asked for before, by its own numbers
        self.rounds: dict[int, tuple[int, Parts]] = {}  # and what it has promised before


class Coordinator:
    """The thread; `start` begins it. `port` is where ranks connect with `token`, a secret of this world."""

    def __init__(self, matcher: Matcher, token: str) -> None:
        self._matcher, self._token = matcher, token
        self._listener = listen()
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: dict[int, _Peer] = {}
        self._left: set[int] = set()
        self._parts: dict[Parts, Parts] = {}  # so that equal ones of several ranks are one, and compared at once
        self._stopped = threading.Event()
        self.everyone_left = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allhands-horovod-coordinator", daemon=True)
        os.register_at_fork(after_in_child=self._close_links)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """End, after all ranks have said that they leave or `patience` seconds."""
        if not self.everyone_left.wait(patience):
            self._over.set()
        self._stopped.set()
        self._thread.join(5.0)
        self._close_links()

    def _close_links(self) -> None:
        # A loader process that outlives this one must not keep its connections open.
        for link in (self._listener, *(peer.link for peer in self._peers.values())):
            with contextlib.suppress(OSError):
                link.close()

    def _run(self) -> None:
        looked = time.monotonic()
        try:
            while not self._stopped.is_set() and not self.everyone_left.is_set():
                for key, events in self._selector.select(_LOOK_EVERY_S):
                    if key.data is None:
                        self._accept()
                    elif events & selectors.EVENT_READ:
                        self._read(key.data)
                    else:
                        self._flush(key.data)
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    looked = time.monotonic()
                    text = self._matcher.look()
                    if text:
                        lines = "".join(f"allhands: {line}\n" for line in text.splitlines())
                        os.write(2, lines.encode("utf-8", "backslashreplace"))
                self._tell()
            if self._over.is_set():
                self._matcher.stop("rank 0 has called shutdown(), or its program is over")
                self._tell()
        except Exception as error:  # a fault of ours must not leave all ranks waiting
            self._matcher.stop(f"the coordinator in rank 0 failed: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self._tell()
            print(f"allhands: the Horovod coordinator failed: {error!r}", file=sys.stderr)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            keep_alive(link)
            self._selector.register(link, selectors.EVENT_READ, _Peer(link))

    def _read(self, peer: _Peer) -> None:
        try:
            piece = peer.link.recv(2**18)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        if not piece:
            return self._lose(peer)
        peer.data += piece
        if b"\n" not in piece:
            return self._lose(peer) if len(peer.data) > (_LONGEST if peer.rank >= 0 else 4096) else None
        *lines, rest = bytes(peer.data).split(b"\n")
        peer.data = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
                if peer.rank < 0:
                    self._welcome(peer, message)
                else:
                    self._hear(peer, message)
            except (ValueError, KeyError, TypeError, AttributeError):
                return self._lose(peer)
        return None

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank = int(message["rank"])
        if not hmac.compare_digest(str(message["token"]), self._token) or not 0 <= rank < self._matcher.size:
            raise ValueError("no rank of this world")
        if rank in self._peers:
            raise ValueError("this rank is here already")
        peer.rank = rank
        self._peers[rank] = peer

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "again" in message:
            self._matcher.ask(peer.rank, *peer.known[int(message["again"])])
        elif "ask" in message:
            set_id, kind, name = message["key"]
            known = ((int(set_id), str(kind), str(name)), Ask.read(message["ask"]))
            if message["number"] is not None:
                peer.known[int(message["number"])] = known
            self._matcher.ask(peer.rank, *known)
        elif "promise" in message:
            number = int(message["promise"])
            if "parts" in message:
                parts = tuple(((int(key[0]), str(key[1]), str(key[2])), Ask.read(ask)) for key, ask in message["parts"])
                peer.rounds[number] = (int(message["set"]), self._parts.setdefault(parts, parts))
            self._matcher.promise(peer.rank, *peer.rounds[number])
        elif "kept" in message:
            self._matcher.kept(peer.rank, int(message["kept"]))
        elif "join" in message:
            self._matcher.join(peer.rank)
        elif "broken" in message:
            self._matcher.stop(str(message["broken"]))
        elif "leave" in message:
            self._left.add(peer.rank)
            for number in message["leave"]:
                self._matcher.kept(peer.rank, int(number))
            self._matcher.leave(peer.rank, "has called shutdown(), or its program is over")
            if len(self._left) == self._matcher.size:
                self.everyone_left.set()

    def _lose(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.link)
        peer.link.close()
        if peer.rank >= 0 and self._peers.pop(peer.rank, None) is not None:
            self._matcher.leave(peer.rank, "is gone without a word: killed, crashed, or its host is down")
            self._left.add(peer.rank)

    def _tell(self) -> None:
        for ranks, message in self._matcher.take():
            data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
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
