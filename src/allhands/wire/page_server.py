"""A small page on this host's loopback for whoever has its address, which holds a token."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from allhands import wire

# Connections that are open at once, of which the oldest is closed when there are more; seconds
# that one may take; bytes of its request.
_MOST, _PATIENCE, _LONGEST = 32, 10.0, 1 << 14
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Answer:
    """What is sent for an address: the body, its type, and the nonce of the scripts in it."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    nonce: str = ""

    @property
    def policy(self) -> str:
        """What a browser may load: nothing but scripts with the nonce, and this page's own data."""
        scripts = f"'nonce-{self.nonce}'" if self.nonce else "'none'"
        return (
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


class PageServer:
    """Answers GET requests whose path begins with the token, on 127.0.0.1 alone, until `close`.

    It changes nothing. Whatever somebody else sends costs one connection, of which few are open at
    a time and none for long.

    Args:
        port: of 127.0.0.1; 0 lets the system choose one.
        answer: called in a thread with what follows the token in a path, such as "" or "now"; None:
            there is nothing.

    Attributes:
        address: of the page, the token in it.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, answer: Callable[[str], Answer | None]) -> None:
        token = secrets.token_urlsafe(24)
        self._http = _Listener(wire.listen(port=port, local=True), token, answer)
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}/{token}/"
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.2,), name="page", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """End, with every connection that is open; safe to call twice."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()
        self._http.close_older_than(0.0)


class _Listener(ThreadingHTTPServer):
    """With bounds; binds nothing itself."""

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, token: str, answer: Callable[[str], Answer | None]
    ) -> None:
        super().__init__(listener.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listener, listener.getsockname()
        self.token, self.answer = token.encode(), answer
        self._open: dict[socket.socket, float] = {}  # when each has come; the oldest first
        self._lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            link, address = super().get_request()
        except OSError:  # out of descriptors, or the other side has gone already
            time.sleep(0.05)
            raise
        wire.close_in_children(link)
        return link, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            while len(self._open) > _MOST:
                self._cut(next(iter(self._open)))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.close_older_than(_PATIENCE)

    def close_older_than(self, seconds: float) -> None:
        """Cut connections; the thread of each then ends by itself."""
        now = time.monotonic()
        with self._lock:
            for link in [link for link, came in self._open.items() if now - came >= seconds]:
                self._cut(link)

    def _cut(self, link: socket.socket) -> None:
        del self._open[link]
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: what somebody sends, or that they have gone, ends their connection."""


class _Bounded:
    """Lines of a request, which ends after so many bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, _LONGEST

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self._file.readline(self._left if size < 0 else min(size, self._left))
        self._left -= len(line)
        if self._left <= 0:
            raise ConnectionError("the request is too long")
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)


class _Request(BaseHTTPRequestHandler):
    """One request, and no other on its connection."""

    server: _Listener
    timeout = _PATIENCE
    server_version, sys_version = "allhands", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        token, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token):
            self._send(403, Answer(b"refused: this is not the page's address\n", "text/plain"))
            return
        found = self.server.answer(rest)
        if found is None:
            self._send(404, Answer(b"there is nothing at this address\n", "text/plain"))
        else:
            self._send(200, found)

    def _send(self, code: int, answer: Answer) -> None:
        self.send_response(code)
        headers = {
            **_HEADERS,
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the path holds the token."""
