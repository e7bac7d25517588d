"""A worker is lost when it is silent, not when its server is slow to listen or its network slow to
bring something."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from allhands.kvstore.monitored_socket import MonitoredSocket
from allhands.kvstore.shard import Shard
from allhands.kvstore.store import Share
from allhands.kvstore.wire_frames import Kind, pack
from tests.kvstore.serving import job

LEASE = 1.5  # a worker gives a sign of life every second


def test_only_waiting_is_silence() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        incoming, got = MonitoredSocket(ours), bytearray(1)
        assert incoming.silent(time.monotonic() + 99.0) == 0.0, "nobody listens yet"
        reader = threading.Thread(target=incoming.recv_into, args=(memoryview(got),))
        began = time.monotonic()
        reader.start()
        while not incoming.silent(began + 5.0):
            time.sleep(0.01)
        assert 4.0 < incoming.silent(began + 5.0) <= 5.0
        incoming.forgive(began + 4.0)
        assert 0.9 < incoming.silent(began + 5.0) < 1.1
        theirs.send(b"x")
        reader.join()
        assert (bytes(got), incoming.silent(time.monotonic() + 99.0)) == (b"x", 0.0)


def test_a_server_that_is_busy_takes_no_worker_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shard.set_optimizer

    # As the first optimizer of a process is, which makes torch import its compiler.
    def slow(*given: object) -> None:
        time.sleep(2 * LEASE)
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Shard, "set_optimizer", slow)
    with job(1, 1, LEASE) as made:
        store = made.store(0)
        store.set_optimizer("sgd", {"lr": 0.5})
        store.init("a", torch.zeros(3))
        store.pushpull("a", torch.ones(3), out := torch.empty(3))
        assert out.tolist() == [-0.5] * 3


def test_a_frame_that_takes_longer_than_the_lease_is_no_silence() -> None:
    with job(1, 1, LEASE) as made:
        store = made.store(0, transport="tcp")
        store.init("a", torch.zeros(1000))
        link = store.links[0]
        _, meta, _ = store._begin(["a"], Share(1.0, 1.0), None, None)
        store._settle()
        piece = store._pieces["a"][0].number
        frame = (
            pack(Kind.PUSH, 0, piece, meta, link.versions[piece] + 1, 4000)
            + torch.ones(1000).numpy().tobytes()
        )
        link.first = lambda *parts: None  # type: ignore[method-assign]
        for part in range(10):  # no beat can come within it
            link._up.sendall(frame[part * 403 : (part + 1) * 403])
            time.sleep(2 * LEASE / 10)
        assert made.servers[0].shards[0].members.sessions_now(), "it is there"
        del link.first
        store.pull("a", out := torch.empty(1000))
        assert out.tolist() == [1.0] * 1000
