"""What waits at sockets for ever ends once it is given up."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from allhands.errors import WorldError
from allhands.world import nccl_connections
from allhands.world.nccl_connections import run_over_sockets
from tests.patience import patience


def test_a_listener_that_nobody_connects_to_ends_once_it_is_given_up() -> None:
    waits, ended = threading.Event(), threading.Event()

    def operation() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            waits.set()
            try:
                listener.accept()
            finally:
                ended.set()

    with pytest.raises(WorldError, match="nccl was not connected before a member was lost"):
        run_over_sockets(operation, patience(100), waits.is_set)
    assert ended.is_set()


def test_a_peer_that_says_nothing_is_waited_for_no_longer_than_the_limit() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as peer:

        def operation() -> None:
            with socket.create_connection(peer.getsockname()) as link:
                assert link.recv(1) == b""
            ended.set()

        with pytest.raises(WorldError, match="not connected within 1 s"):
            run_over_sockets(operation, 1.0, lambda: False)
    assert ended.wait(patience(20))


def test_a_thread_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_connections, "_END_S", 0.1)
    over = threading.Event()
    began = time.monotonic()
    with pytest.raises(WorldError):
        run_over_sockets(over.wait, patience(100), lambda: True)
    assert time.monotonic() - began < patience(20)
    over.set()


def test_sockets_that_were_there_before_and_the_store_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as store, one, two:
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        links: list[socket.socket] = []
        came, over = threading.Event(), threading.Event()

        def operation() -> None:
            links.append(socket.create_connection(store.getsockname()))
            came.set()
            over.wait(patience(20))

        monkeypatch.setattr(nccl_connections, "_END_S", 0.1)
        with pytest.raises(WorldError):
            run_over_sockets(operation, patience(100), came.is_set)
        other, _ = store.accept()
        with other, links[0]:
            other.sendall(b"x")
            assert links[0].recv(1) == b"x"
        over.set()
        one.sendall(b"x")
        assert two.recv(1) == b"x"


def test_what_ends_is_awaited_and_what_fails_says_why() -> None:
    done: list[int] = []
    run_over_sockets(lambda: done.append(1), patience(100), lambda: False)
    assert done == [1]

    def fails() -> None:
        raise RuntimeError("unhandled system error")

    with pytest.raises(WorldError, match="nccl was not connected: unhandled system error"):
        run_over_sockets(fails, patience(100), lambda: False)
