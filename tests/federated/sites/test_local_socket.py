import json
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.patience import patience

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from allhands import wire
from allhands.federated.sites import local_socket
from allhands.federated.sites.local_socket import Listener, SocketError, ask, token_of


@pytest.fixture
def address(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "warm.sock"


@pytest.fixture
def listening(address):
    """Starts a listener that answers with what a function makes of the request."""
    made = []

    def start(handle):
        listener, over = Listener(address), threading.Event()
        thread = threading.Thread(
            target=listener.serve, args=(handle, lambda idle: not over.is_set())
        )
        thread.start()
        made.append((listener, over, thread))
        return listener

    yield start
    for listener, over, thread in made:
        over.set()
        thread.join(10)
        assert not thread.is_alive()
        listener.close()


def request(size=3):
    return RecordDict(
        {
            "allhands": ConfigRecord(
                {"kind": "train", "lr": 0.1, "names": ["a", "b"], "yes": True}
            ),
            "figures": MetricRecord({"loss": float("nan"), "count": 2**53}),
            "model": ArrayRecord(
                {
                    "row": Array(np.arange(size, dtype=np.float32)),
                    "integers": Array(np.zeros(0, np.int64)),
                }
            ),
        }
    )


def test_records_come_over_as_they_are(listening, address):
    listening(lambda content: content)
    back = ask(address, request(3_000_000))
    assert list(back) == ["allhands", "figures", "model"]
    assert dict(back["allhands"]) == dict(request()["allhands"])
    assert np.isnan(back["figures"]["loss"])
    assert back["figures"]["count"] == 2**53
    assert {name: array.data for name, array in back["model"].items()} == {
        name: array.data for name, array in request(3_000_000)["model"].items()
    }


def test_only_its_user_can_open_the_socket_and_read_the_token(listening, address):
    listening(lambda content: content)
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    assert stat.S_IMODE(token_of(address).stat().st_mode) == 0o600


def test_a_wrong_token_is_refused_and_nothing_is_done(listening, address):
    asked = []
    listening(lambda content: asked.append(content) or content)
    right = token_of(address).read_bytes()
    token_of(address).write_bytes(b"x" * len(right))
    with pytest.raises(SocketError, match="refused the request: the token is not this site's"):
        ask(address, request())
    token_of(address).write_bytes(b"")
    with pytest.raises(SocketError):
        ask(address, request())
    token_of(address).unlink()
    with pytest.raises(SocketError, match="token of the site's warm process cannot be read"):
        ask(address, request())
    assert not asked
    token_of(address).write_bytes(right)
    assert ask(address, request())["allhands"]["kind"] == "train"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{}",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                json.dumps({"records": {"a": ["pickle", {}]}}).encode(),
                json.dumps({"records": {"a": ["config", {"x": {}}]}}).encode(),
                json.dumps({"records": {"a": ["array", {"x": ["f", [1], "s", -1]}]}}).encode(),
                json.dumps({"records": 3}).encode(),
                json.dumps({"records": {"a": 3}}).encode(),
            )
        ),
    ],
)
def test_a_peer_that_says_nothing_readable_costs_nobody_else_anything(frame, listening, address):
    asked = []
    listener = listening(lambda content: asked.append(content) or content)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(address))
        wire.introduce(peer, listener.token, {})
        peer.sendall(frame)
    assert ask(address, request())["allhands"]["kind"] == "train"
    assert len(asked) == 1


def test_a_peer_that_says_nothing_at_all_is_let_go(listening, address, monkeypatch):
    monkeypatch.setattr(local_socket, "_PATIENCE", 0.2)
    listening(lambda content: content)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(address))
        assert ask(address, request())["allhands"]["kind"] == "train"


def test_nobody_who_listens_is_waited_for_and_then_said(address):
    began = time.monotonic()
    with pytest.raises(SocketError, match="does not listen"):
        ask(address, request(), patience=0.3)
    assert time.monotonic() - began < patience(5)


def test_a_process_that_comes_later_is_found(listening, address):
    timer = threading.Timer(0.3, listening, [lambda content: content])
    timer.start()
    assert ask(address, request(), patience=20)["allhands"]["kind"] == "train"
    timer.join()


def test_an_end_in_the_middle_of_a_request_is_said(address):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen()
        local_socket.write_token(token_of(address))
        ended = threading.Thread(target=lambda: [server.accept()[0].close()])
        ended.start()
        with pytest.raises(
            SocketError, match="ended in the middle of the request; the site starts it again"
        ):
            ask(address, request())
        ended.join()


def test_a_path_that_is_too_long_for_a_socket_works_all_the_same(listening, tmp_path):
    address = tmp_path / ("x" * 120) / "warm.sock"
    address.parent.mkdir()
    listener, over = Listener(address), threading.Event()
    thread = threading.Thread(
        target=listener.serve, args=(lambda content: content, lambda idle: not over.is_set())
    )
    thread.start()
    assert ask(address, request())["allhands"]["kind"] == "train"
    over.set()
    thread.join()
    listener.close()
    assert not list(address.parent.iterdir())


def test_nothing_of_it_imports_torch():
    code = (
        "import sys, allhands.federated.sites.client_app, "
        "allhands.federated.sites.message_process as m; "
        "m.prepare(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
