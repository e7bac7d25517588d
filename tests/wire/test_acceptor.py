"""Strangers before a listener: they are bounded, named and change nothing for those who know the
token."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from allhands import wire
from allhands.wire import acceptor, proof

TOKEN = b"0123456789abcdef"


class Service:
    """An acceptor on loopback and what it has let in."""

    def __init__(self) -> None:
        self.came: list[dict[str, Any]] = []
        listener = wire.listen(local=True)
        self.port = int(listener.getsockname()[1])
        self.acceptor = wire.Acceptor("the test", [listener], TOKEN, self.welcome)
        self.acceptor.start()

    def welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        if said.get("unwanted"):
            raise wire.RefusedError("nobody asked for it")
        with link:
            self.came.append(said)
            link.sendall(b"welcome")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5.0)

    def comes(self, said: dict[str, Any]) -> None:
        with wire.join(self.connect, TOKEN, said, 5.0) as link:
            assert link.recv(7) == b"welcome"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.acceptor.close()
    assert not made.acceptor._thread.is_alive()


def wait_for(seen: Any) -> None:
    end = time.monotonic() + 10.0
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_knows_the_token_comes_in(service: Service) -> None:
    service.comes({"rank": 3})
    assert service.came == [{"rank": 3}]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x80\x05",
        b"[" * 100_000,
        b"{",
        b'{"rank": 1}\n',
        b"\x16\x03\x01\x02\x00\x01" + bytes(600),
        proof.GREETING + b"\xff" * 300,
    ],
    ids=["nothing", "pickle", "deep", "cut", "a rank", "tls", "huge length"],
)
def test_a_stranger_is_named_and_the_next_comes_in(
    service: Service, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with service.connect() as link:
        name = link.getsockname()
        with contextlib.suppress(OSError):  # the rest was not read
            link.sendall(said)
            link.shutdown(socket.SHUT_WR)
            while link.recv(4096):
                pass
    service.comes({})
    assert (
        f"refused a connection from 127.0.0.1:{name[1]} to the test: it " in capfd.readouterr().err
    )


def test_another_token_is_told_apart_from_a_closed_connection(service: Service) -> None:
    with pytest.raises(wire.RefusedError, match="it has another token"):
        wire.join(service.connect, b"another token", {}, 5.0)
    with service.connect() as link, pytest.raises(EOFError):
        wire.introduce(link, TOKEN, {"unwanted": True})
        assert not link.recv(7)
        raise EOFError
    assert service.came == []


def test_what_was_said_once_is_not_taken_again(service: Service) -> None:
    with service.connect() as link:
        challenge = link.recv(4096)[len(proof.GREETING) :]
        heard = proof.introduction(TOKEN, challenge, bytes(32), b'{"rank": 1}')
    with service.connect() as link:
        link.recv(4096)
        link.sendall(heard)
        assert link.recv(4096) == bytes(32)
    assert service.came == []


def test_a_byte_now_and_then_does_not_hold_a_place(
    service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "PATIENCE", 0.5)
    with service.connect() as link:
        link.recv(4096)
        link.settimeout(0.05)
        end = time.monotonic() + 20.0
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                link.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not link.recv(1):
                        break
        assert time.monotonic() < end
    assert "it proved nothing within " in capfd.readouterr().err


def test_the_oldest_of_many_strangers_goes_and_lines_are_rare(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    idle = [service.connect() for _ in range(300)]
    service.comes({"rank": 1})
    wait_for(lambda: len(service.acceptor._strangers) <= acceptor._OF_ONE_ADDRESS)
    assert len(os.listdir("/proc/self/fd")) - before - len(idle) <= acceptor._OF_ONE_ADDRESS + 2
    time.sleep(1.5)
    lines = capfd.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    assert "more in the last seconds" in lines[-1]
    for link in idle:
        link.close()
    service.comes({"rank": 2})


def test_a_child_keeps_nothing_open(service: Service) -> None:
    with wire.join(service.connect, TOKEN, {}, 5.0):
        child = os.fork()
        if child == 0:
            refused = socket.socket().connect_ex(("127.0.0.1", service.port)) == 0
            os._exit(
                len([one for one in wire.listeners._open if one.fileno() >= 0]) + 10 * (not refused)
            )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_lines_have_bounds() -> None:
    reader = wire.LineReader(100)
    assert reader.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert reader.feed(b": 2}\n") == [{"b": 2}]
    for wrong in (b"[" * 50_000 + b"\n", b"x" * 101, b"[1]\n", b"\xff\n", b"1" * 5000 + b"\n"):
        with pytest.raises(wire.MessageError):
            wire.LineReader(None if wrong.startswith(b"[") else 100).feed(wrong)
