"""Another user's process on the same host is refused, whatever it knows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allhands import wire
from allhands.wire.users import _in_table, of_another_user

TOKEN = b"the number of a job"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# The modules are imported before the user is left that can read them.
PEER = """
import encodings.idna, os, socket, sys
from allhands import wire
port, user = int(sys.argv[1]), int(sys.argv[2])
os.setuid(user)
link = socket.create_connection(("127.0.0.1", port), 10)
wire.introduce(link, b"the number of a job", {"user": user})
print("in" if link.recv(1) == b"+" else "out")
"""
LISTENER = """
import os, sys, time
from allhands import wire
os.setuid(int(sys.argv[1]))
listener = wire.listen(local=sys.argv[2] == "local")
wire.Acceptor("the test", [listener], b"the number of a job", lambda *_: None).start()
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def _listening(local: bool) -> tuple[wire.Acceptor, int]:
    def welcome(link: socket.socket, said: object) -> None:
        with link:
            link.sendall(b"+")

    listener = wire.listen(local=local)
    acceptor = wire.Acceptor("the test", [listener], TOKEN, welcome)
    acceptor.start()
    return acceptor, int(listener.getsockname()[1])


@as_root
@pytest.mark.serial
@pytest.mark.parametrize("local", [True, False], ids=["loopback", "all addresses"])
def test_another_user_who_knows_the_token_stays_out(
    local: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    acceptor, port = _listening(local)
    told = {}
    for user in (NOBODY, 0):
        words = [sys.executable, "-c", PEER, str(port), str(user)]
        told[user] = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    acceptor.close()
    assert told == {NOBODY: "out\n", 0: "in\n"}
    assert "to the test: it is a process of another user of this host" in capfd.readouterr().err


@as_root
@pytest.mark.serial
@pytest.mark.parametrize("local", ["local", "everywhere"])
def test_another_users_listener_is_not_believed(local: str) -> None:
    words = [sys.executable, "-c", LISTENER, str(NOBODY), local]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with (
            socket.create_connection(("127.0.0.1", port), 10) as link,
            pytest.raises(wire.RefusedError, match="a process of another user of this host"),
        ):
            wire.introduce(link, TOKEN, {})


def _pair_unix(folder: Path) -> tuple[socket.socket, socket.socket]:
    with wire.listen_unix(str(folder / "s")) as listener:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(folder / "s"))
        return link, listener.accept()[0]


def _pair_tcp(folder: Path) -> tuple[socket.socket, socket.socket]:
    with wire.listen() as listener:
        link = socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 10)
        return link, listener.accept()[0]


@pytest.mark.parametrize("pair", [_pair_unix, _pair_tcp])
def test_two_ends_of_one_user(
    pair: Callable[[Path], tuple[socket.socket, socket.socket]], tmp_path: Path
) -> None:
    one, other = pair(tmp_path)
    with one, other:
        assert not of_another_user(one)
        assert not of_another_user(other)


@pytest.mark.skipif(sys.byteorder != "little", reason="examples of a little-endian host")
def test_addresses_of_the_kernels_table() -> None:
    told = ["0100007F:8847", "0000000000000000FFFF00000100007F:BACC", f"{'0' * 24}01000000:0016"]
    found = [(str(address), port) for address, port in map(_in_table, told)]
    assert found == [("127.0.0.1", 34887), ("127.0.0.1", 47820), ("::1", 22)]
