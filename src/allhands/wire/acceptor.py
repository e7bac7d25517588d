"""Lets in who proves the job's token, and bounds what everybody else can take."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from allhands.wire import proof
from allhands.wire.links import at_once
from allhands.wire.listeners import close_in_children
from allhands.wire.proof import RefusedError
from allhands.wire.users import of_another_user

if TYPE_CHECKING:
    import ssl

# Connections that have not proven themselves yet, of one listener and of one address. When there
# are more, the oldest is closed; a peer of the job then comes again.
_STRANGERS = 128
_OF_ONE_ADDRESS = 64
_TELL_EVERY_S = 1.0

Welcome = Callable[[socket.socket, dict[str, Any]], None]


class _Stranger:
    """A connection that has not proven itself."""

    def __init__(
        self, link: socket.socket, host: str, name: str, token: bytes, tls: ssl.SSLContext | None
    ) -> None:
        self.link, self.host, self.name = link, host, name
        self.handshake: Callable[[], None] | None = None  # of TLS
        self.later: tuple[type[OSError], ...] = (BlockingIOError,)
        if tls is not None:
            import ssl

            wrapped = tls.wrap_socket(link, server_side=True, do_handshake_on_connect=False)
            self.link, self.handshake = wrapped, wrapped.do_handshake
            self.later = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self.deadline = time.monotonic() + proof.PATIENCE
        self.steps: Generator[tuple[bytes, int], bytes, dict[str, Any]] | None = None
        self.token = token
        self.wanted = 0
        self.data = bytearray()

    def advance(self) -> dict[str, Any] | None:
        """Read what has come; what the peer says of itself, once it has proven the token.

        Raises:
            Exception: it is to be refused.
        """
        with contextlib.suppress(*self.later):
            if self.handshake is not None:
                self.handshake()
                self.handshake = None
            if self.steps is None:
                self.steps = proof.listener_side(self.token)
                self._send(next(self.steps))
            while True:  # TLS may hold bytes that a selector does not see
                while len(self.data) < self.wanted:
                    piece = self.link.recv(self.wanted - len(self.data))
                    if not piece:
                        raise RefusedError("it closed the connection before it proved anything")
                    self.data += piece
                data, self.data = bytes(self.data), bytearray()
                try:
                    self._send(self.steps.send(data))
                except StopIteration as over:
                    said: dict[str, Any] = over.value
                    return said
        return None

    def _send(self, step: tuple[bytes, int]) -> None:
        data, self.wanted = step
        if data and self.link.send(data) != len(data):
            raise RefusedError("it does not read")


class Acceptor:
    """A thread that accepts connections until `close`.

    Whatever a stranger sends costs its own connection and nothing more. A refused one is told on
    standard error with its address, at most one line a second.

    Args:
        what: names the service in messages, such as "the failure detector".
        listeners: of `allhands.wire.listen` and `listen_unix`; they belong to the acceptor now.
        token: the job's.
        welcome: gets each connection that has proven the token, blocking, and what its peer says of
            itself. It runs in the acceptor's thread. What it raises closes that connection.
        tls: for connections over TCP.
    """

    def __init__(
        self,
        what: str,
        listeners: Sequence[socket.socket],
        token: bytes,
        welcome: Welcome,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._what, self._token, self._welcome, self._tls = what, token, welcome, tls
        self._listeners = list(listeners)
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_end = socket.socketpair()
        self._closed = False
        self._told_at, self._untold, self._last = -_TELL_EVERY_S, 0, ""
        for link in (*self._listeners, self._wake):
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ)
        for link in (self._wake, self._wake_end):
            close_in_children(link)
        self._thread = threading.Thread(target=self._run, name=f"accept {what}", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop to listen, and drop everybody who has not proven the token; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake_end.send(b"!")
        if threading.current_thread() is not self._thread:
            if self._thread.ident is None:
                self._end()
            else:
                self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while not self._closed:
                ready = [key.fileobj for key, _ in self._selector.select(self._rest_s())]
                for link in ready:  # before new ones, which may take their place
                    if link in self._strangers:
                        self._advance(self._strangers[link])
                for link in ready:
                    if link in self._listeners and not self._closed:
                        self._accept(link)
                now = time.monotonic()
                for late in [one for one in self._strangers.values() if now > one.deadline]:
                    self._refuse(late, f"it proved nothing within {proof.PATIENCE:.0f} s")
                self._tell()
        finally:
            self._end()

    def _rest_s(self) -> float | None:
        ends = [one.deadline for one in list(self._strangers.values())[:1]]
        ends += [self._told_at + _TELL_EVERY_S] if self._untold else []
        return max(0.0, min(ends) - time.monotonic()) + 0.01 if ends else None

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, or the other side has gone already
            for oldest in list(self._strangers.values())[:1]:
                self._refuse(oldest, "there are no descriptors left")
            time.sleep(0.05)
            return
        host, name = _named(link, address)
        try:
            link.setblocking(False)
            tls = None if link.family == socket.AF_UNIX else self._tls
            stranger = _Stranger(link, host, name, self._token, tls)
        except OSError:  # it has gone already
            link.close()
            return
        close_in_children(stranger.link)
        self._strangers[stranger.link] = stranger
        self._selector.register(stranger.link, selectors.EVENT_READ)
        others = [one for one in self._strangers.values() if one.host == host]
        if len(others) > _OF_ONE_ADDRESS:
            self._refuse(
                others[0], f"more than {_OF_ONE_ADDRESS} connections of {host} prove nothing"
            )
        elif len(self._strangers) > _STRANGERS:
            oldest = next(iter(self._strangers.values()))
            self._refuse(oldest, f"more than {_STRANGERS} connections prove nothing")
        if stranger.link in self._strangers:
            self._advance(stranger)  # sends the challenge

    def _advance(self, stranger: _Stranger) -> None:
        try:
            said = stranger.advance()
            if said is None:
                return
            # The token of a job without a secret is its number, which others on its host can see.
            if of_another_user(stranger.link):
                raise RefusedError("it is a process of another user of this host")
            self._let_go(stranger)
            stranger.link.settimeout(None)
            at_once(stranger.link)
            self._welcome(stranger.link, said)
        except Exception as error:  # whatever a peer says, the others go on
            if isinstance(error, RefusedError):
                why = str(error)
            else:
                why = f"{type(error).__name__}: {error}"
            self._refuse(stranger, why)

    def _let_go(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.link)

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._let_go(stranger)
        self._untold += 1
        self._last = f"from {stranger.name} to {self._what}: {why}"
        self._tell()
        stranger.link.close()

    def _tell(self) -> None:
        now = time.monotonic()
        if not self._untold or now - self._told_at < _TELL_EVERY_S:
            return
        more = f" (and {self._untold - 1} more in the last seconds)" if self._untold > 1 else ""
        text = f"allhands: refused a connection {self._last[:500]}{more}\n"
        self._told_at, self._untold = now, 0
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))

    def _end(self) -> None:
        self._selector.close()
        for link in (*self._listeners, *self._strangers, self._wake, self._wake_end):
            link.close()
        self._strangers.clear()


def _named(link: socket.socket, address: Any) -> tuple[str, str]:
    """A peer's address, which its quota goes by, and its name for messages."""
    if link.family == socket.AF_UNIX:
        with contextlib.suppress(OSError, AttributeError):
            found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", found)
            return f"uid {uid}", f"process {pid} of user {uid} on this host"
        return "this host", "a process of this host"
    host = str(address[0]).removeprefix("::ffff:")
    return host, f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
