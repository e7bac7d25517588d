"""The page for whoever has its address: who gets an answer, and what others can take."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from allhands.wire import page_server
from allhands.wire.page_server import Answer, PageServer
from tests.patience import patience


def answer(path: str) -> Answer | None:
    return {"": Answer(b"the page", nonce="once"), "now": Answer(b"1")}.get(path)


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(0, answer)
    made.start()
    yield made
    made.close()
    made.close()


def get(server: PageServer, path: str, verb: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    there = urlsplit(server.address)
    link = http.client.HTTPConnection(there.hostname or "", there.port, timeout=patience(10))
    with contextlib.closing(link):
        link.request(verb, path)
        reply = link.getresponse()
        return reply.status, reply.read(), dict(reply.getheaders())


def raw(server: PageServer) -> socket.socket:
    there = urlsplit(server.address)
    return socket.create_connection((there.hostname, there.port), timeout=patience(20))


def test_the_token_opens_the_page_and_nothing_else_does(server: PageServer) -> None:
    path = urlsplit(server.address).path
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert len(path) > 30
    assert get(server, path)[:2] == (200, b"the page")
    assert get(server, path.rstrip("/"))[:2] == (200, b"the page")
    assert get(server, f"{path}now?again")[:2] == (200, b"1")
    assert get(server, f"{path}other")[0] == 404
    for wrong in ("/", "/now", path[:-2] + "/", f"{path[:-1]}x/", "/%00/", "//"):
        status, body, _ = get(server, wrong)
        assert (status, body) == (403, b"refused: this is not the page's address\n"), wrong
    with raw(server) as link:
        link.sendall(b"GET /\xff\xe9/ HTTP/1.0\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.0 403 ")


def test_a_browser_may_load_nothing_from_elsewhere_and_keeps_nothing(server: PageServer) -> None:
    headers = get(server, urlsplit(server.address).path)[2]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'nonce-once'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Python" not in headers["Server"]
    refused = get(server, "/")[2]
    assert "script-src 'none'" in refused["Content-Security-Policy"]


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: PageServer, verb: str) -> None:
    assert get(server, urlsplit(server.address).path, verb)[0] == 501


def test_the_token_differs_every_time_and_the_port_is_of_loopback() -> None:
    servers = [PageServer(0, answer) for _ in range(2)]
    one, other = (urlsplit(server.address) for server in servers)
    assert one.path != other.path
    with pytest.raises(OSError, match="in use"):
        PageServer(one.port or 0, answer)
    for made in servers:
        made.close()


def test_a_request_that_is_too_long_ends(server: PageServer) -> None:
    with raw(server) as link:
        with contextlib.suppress(OSError):
            link.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5000)
        with contextlib.suppress(ConnectionError):
            assert b"200 OK" not in b"".join(iter(lambda: link.recv(4096), b""))
    assert get(server, urlsplit(server.address).path)[0] == 200


def test_who_says_nothing_is_cut_off_and_others_are_served(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_PATIENCE", 0.5)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(b"GET / HT")
        assert get(server, urlsplit(server.address).path)[0] == 200
        for link in (silent, slow):
            with contextlib.suppress(ConnectionError):
                assert link.recv(100) == b""


def test_of_many_connections_the_oldest_are_closed(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_MOST", 4)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(raw(server)) for _ in range(30)]
        for link in links[:20]:
            with contextlib.suppress(ConnectionError):
                assert link.recv(100) == b""
        deadline = time.monotonic() + patience(10)
        while threading.active_count() > before + 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before + 6
        assert get(server, urlsplit(server.address).path)[0] == 200


def test_after_the_end_nobody_listens_and_no_connection_is_left() -> None:
    made = PageServer(0, answer)
    made.start()
    with raw(made) as link:
        assert get(made, urlsplit(made.address).path)[0] == 200
        made.close()
        with contextlib.suppress(ConnectionError):
            assert link.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        raw(made)


def test_an_answer_that_fails_ends_its_connection_alone() -> None:
    def fails(path: str) -> Answer:
        raise ValueError(path)

    made = PageServer(0, fails)
    made.start()
    path = urlsplit(made.address).path
    for _ in range(2):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(made, path)
    made.close()
