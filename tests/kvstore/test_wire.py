"""What strangers and damaged peers send: the server stays up, takes no memory for it, and executes
nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands import wire
from allhands.errors import WorldError
from allhands.kvstore.rules import rules_of
from allhands.kvstore.store_modes import mode_named
from allhands.kvstore.wire_frames import MAGIC, Kind, pack
from allhands.wire import proof
from tests.kvstore.serving import TOKEN, Job, job


def _knock(made: Job) -> socket.socket:
    return socket.create_connection((made.where[0]["address"], made.where[0]["port"]), timeout=5.0)


def _still_serves(made: Job, number: int) -> None:
    store = made.store(0, number=number)
    store.init("a", torch.zeros(3))
    store.pushpull("a", torch.ones(3), out := torch.empty(3))
    assert out.tolist() == [1.0, 1.0, 1.0]
    store.close()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_strangers_change_nothing(tmp_path: Path) -> None:
    bomb = tmp_path / "executed"
    draw = random.Random(7)
    said = [draw.randbytes(draw.randrange(1, 3000)) for _ in range(200)]
    said += [
        pickle.dumps(_Bomb(bomb)),
        b"allhands wire 1\n",
        b"allhands wire 1\n" + b"\xff" * 200,
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    said += [
        pack(Kind.PUSH, 0, 1, 1, 1, 1 << 62),
        b"allhands wire 1\n" + bytes(64) + struct.pack("<I", 1 << 31),
    ]
    with job(1) as made:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in said:
            with _knock(made) as link:
                link.sendall(data)
        silent = [_knock(made) for _ in range(20)]
        _still_serves(made, 0)
        for link in silent:
            link.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert not bomb.exists()


@pytest.mark.parametrize(
    "frames",
    [
        random.Random(8).randbytes(5000),
        pack(Kind.PUSH, 0, 99, 1, 1, 10) + bytes(10),
        pack(Kind.PUSH, 0, 0, 1, 1, 1 << 63),
        pack(Kind.PULL_ROWS, 0, 5, 1, 1, 1 << 40),
        pack(Kind.MESSAGE, nbytes=1 << 50),
        pack(Kind.MESSAGE, nbytes=4) + b"[1]x",
        pack(Kind.MESSAGE, nbytes=20) + b'{"op":"no such thing',
        pack(Kind.STATE, nbytes=9) + b"not right",
        pack(Kind.VALUE),
        MAGIC + b"\x01",
    ],
)
def test_a_worker_that_sends_nonsense_is_the_only_one_that_suffers(frames: bytes) -> None:
    with job(1) as made:
        rules = rules_of(mode_named("dist"), {"on_worker_loss": "continue"})
        links = {}
        for side in ("up", "down"):
            links[side] = _knock(made)
            said = {
                "rank": 0,
                "rules": rules,
                "life": "bad",
                "store": 5,
                "host": "h",
                "pid": 1,
                "session": "s",
                "maps": False,
            }
            wire.introduce(links[side], TOKEN.encode(), {**said, "side": side})
        # The server may have closed the connection before all was sent.
        with contextlib.suppress(OSError):
            links["up"].sendall(frames)
            links["up"].shutdown(socket.SHUT_WR)
            links["down"].settimeout(10.0)
            while links["down"].recv(4096):
                pass  # a message may come first
        assert not made.servers[0].shards[5].members.sessions_now()
        _still_serves(made, 0)
        for link in links.values():
            link.close()


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_another_token_is_refused_on_both_sides(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(1) as made:
        monkeypatch.setenv("ALLHANDS_TOKEN", "another token, long enough")
        with pytest.raises(WorldError, match=r"server 0 .* it has another token"):
            made.store(0, transport=transport)
        monkeypatch.setenv("ALLHANDS_TOKEN", TOKEN)
        _still_serves(made, 0)


def _certificates(folder: Path, name: str) -> dict[str, str]:
    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    run(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}-ca",
        "-keyout",
        f"{name}-ca.key",
        "-out",
        f"{name}-ca.pem",
    )
    run(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
    )
    run(
        "x509",
        "-req",
        "-in",
        f"{name}.csr",
        "-CA",
        f"{name}-ca.pem",
        "-CAkey",
        f"{name}-ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-out",
        f"{name}.pem",
    )
    kinds = {"CERT": f"{name}.pem", "KEY": f"{name}.key", "CA": f"{name}-ca.pem"}
    return {f"ALLHANDS_KVSTORE_TLS_{kind}": str(folder / path) for kind, path in kinds.items()}


def test_tls_serves_those_of_the_same_authority_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PATIENCE", 1.0)
    right, wrong = _certificates(tmp_path, "right"), _certificates(tmp_path, "wrong")
    for name, path in right.items():
        monkeypatch.setenv(name, path)
    with job(2) as made:

        def work(rank: int) -> list[float]:
            store = made.store(rank, transport="tcp")
            store.init("a", torch.zeros(200_000))
            store.pushpull("a", torch.full((200_000,), 1.0 + rank), out := torch.empty(200_000))
            store.barrier()
            store.close()
            return [float(out.min()), float(out.max())]

        assert made.run(work) == [[3.0, 3.0]] * 2
        for name, path in wrong.items():
            monkeypatch.setenv(name, path)
        with pytest.raises(WorldError, match=r"server 0 .*cannot be used"):
            made.store(0, number=1, transport="tcp")
        for name in right:
            monkeypatch.delenv(name)
        with pytest.raises(WorldError, match=r"server 0 .*cannot be used"):
            made.store(0, number=2, transport="tcp")
