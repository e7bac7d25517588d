"""The probe as it runs on a host: here, without ssh, with nothing but what it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.doctor import probe_network
from allhands.doctor.contact import Contact, _first_message
from allhands.doctor.probe_network import interfaces
from allhands.errors import HostError
from allhands.launch.remote import AGENT_LINE, agent_words
from allhands.wire.proof import GREETING
from tests.patience import patience

pytestmark = pytest.mark.serial

TOKEN = "0123456789abcdef"


@pytest.fixture
def contact() -> Iterator[Contact]:
    found = Contact("here", None, sys.executable, {"OMP_NUM_THREADS": "3"})
    found.start()
    yield found
    found.close()


def test_what_is_sent_needs_the_standard_library_only() -> None:
    """On a Python without packages, as on a host without allhands and torch."""
    message = _first_message({}, [])
    questions = (
        b'{"op": "facts"}\n{"op": "listen", "token": "x"}\n{"op": "connect", "token": "x", '
        b'"targets": []}\n'
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", *agent_words("")[1:]],
        input=message + questions,
        capture_output=True,
    )
    assert done.stderr == b""
    _, _, answers = done.stdout.partition(AGENT_LINE)
    facts, listening, connected = [json.loads(line)["answer"] for line in answers.splitlines()]
    assert facts["versions"] == {
        "Python": platform.python_version(),
        "torch": None,
        "allhands": None,
        "numpy": None,
        "CUDA": None,
    }
    assert facts["interfaces"] == interfaces()
    assert listening["port"] > 0
    assert connected == []


def test_facts(contact: Contact) -> None:
    told = contact.ask("facts", 25)
    assert told["hostname"] == socket.gethostname()
    assert told["versions"]["torch"] == str(torch.__version__)
    assert told["versions"]["CUDA"] == torch.version.cuda
    assert told["variables"]["OMP_NUM_THREADS"] == "3"
    assert told["cores"] == len(os.sched_getaffinity(0))
    assert told["memory"]["total"] >= told["memory"]["free"] > 0
    assert told["shm"]["total"] >= told["shm"]["free"]
    assert "lo" not in [one["name"] for one in told["interfaces"]]


def test_an_answer_that_fails_is_told_and_the_next_one_comes(contact: Contact) -> None:
    with pytest.raises(
        HostError,
        match=r"host here: the examination failed there \(asked for flood\): "
        r"ConnectionRefusedError",
    ):
        contact.ask("flood", address="127.0.0.1", port=1, token=TOKEN, seconds=0.1)
    assert abs(contact.ask("clock") - time.time()) < 5


def test_a_late_answer_ends_the_conversation(contact: Contact) -> None:
    with pytest.raises(HostError, match=r"it did not answer within 0 s \(asked for facts\)"):
        contact.ask("facts", 0.0)
    assert contact._process is None or contact._process.poll() is not None


def test_listening_and_flooding(contact: Contact) -> None:
    port = contact.ask("listen", token=TOKEN)["port"]
    got = contact.ask("flood", address="127.0.0.1", port=port, token=TOKEN, seconds=0.2)
    assert got["bytes"] > 0
    assert got["bytes"] % probe_network.CHUNK == 0  # all that was sent
    assert 0 < got["seconds"] < patience(5)


def test_strangers_are_named_and_the_token_never_travels(
    contact: Contact, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = contact.ask("listen", token=TOKEN)["port"]
    for attack in (b"x" * len(TOKEN) + b"k", b"[" * 5000, GREETING + b"\xff" * 300):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            name = stranger.getsockname()[1]
            with contextlib.suppress(OSError):  # it may be refused before it has sent all
                stranger.sendall(attack)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1 << 16)[: len(GREETING)] == GREETING
                assert stranger.recv(1) in (b"", bytes(1))
        time.sleep(1.1)  # one line a second
        assert f"from 127.0.0.1:{name} to allhands doctor" in capfd.readouterr().err
    with pytest.raises(HostError, match="RefusedError: it has another token"):
        contact.ask("flood", address="127.0.0.1", port=port, token="another", seconds=0.1)
    # What a peer sends to whoever listens there.
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def hear() -> None:
            link = foreign.accept()[0]
            with link:
                link.sendall(GREETING + bytes(32))
                sent.extend(link.recv(4096))

        thread = threading.Thread(target=hear)
        thread.start()
        monkeypatch.setattr(probe_network, "own_addresses", dict)
        monkeypatch.setattr(probe_network, "resolve", _any_address)
        found = probe_network.knock("other", foreign.getsockname()[1], TOKEN)
        thread.join(10)
    assert found["error"] is not None
    assert len(sent) > 64
    assert TOKEN.encode() not in sent


def _any_address(name: str) -> dict[str, Any]:
    return {"addresses": ["0.0.0.0"], "error": None}


def test_connecting_tells_what_happened_under_each_name(
    contact: Contact, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = contact.ask("listen", token=TOKEN)["port"]
    (answer,) = contact.ask(
        "connect",
        token=TOKEN,
        targets=[{"names": ["127.0.0.1", "no-such-host.invalid"], "port": port}],
    )
    assert answer["reached"] is None
    assert answer["tried"][0]["error"] == "that is this host itself"
    assert "the name is not known" in answer["tried"][1]["error"]
    # Were it another host's address, it would answer.
    monkeypatch.setattr(probe_network, "own_addresses", dict)
    monkeypatch.setattr(probe_network, "resolve", _any_address)
    good = probe_network.knock("other", port, TOKEN)
    assert (good["error"], good["address"], good["own"]) == (None, "0.0.0.0", "127.0.0.1")
    found = probe_network.knock("other", port, "another token")
    assert found["error"] == "something else answers there"
    monkeypatch.setattr(probe_network, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = probe_network.knock("other", silent.getsockname()[1], TOKEN)
        assert found["error"] == "timed out"


def test_a_folder_and_its_mark(contact: Contact, tmp_path: Path) -> None:
    told = contact.ask("folder", path=str(tmp_path), will_be_made=False, mark=".m1")
    assert (told["exists"], told["is_folder"], told["error"], told["used"]) == (
        True,
        True,
        None,
        str(tmp_path),
    )
    assert told["free"] > 0
    assert (tmp_path / ".m1").stat().st_size == 4096
    assert contact.ask("look", path=str(tmp_path), marks=[".m0", ".m1"]) == [".m1"]
    told = contact.ask("folder", path=f"{tmp_path}/a/b", will_be_made=True, mark=".m2")
    assert (told["exists"], told["used"]) == (False, str(tmp_path))
    told = contact.ask("folder", path=f"{tmp_path}/a/b", will_be_made=False, mark=".m3")
    assert (told["exists"], told["is_folder"]) == (False, False)
    told = contact.ask("folder", path="/proc", will_be_made=False, mark=".m4")
    assert told["error"]
    assert told["type"] == "proc"
    contact.close()
    assert list(tmp_path.iterdir()) == []


def test_the_mark_goes_away_with_a_signal_too(contact: Contact, tmp_path: Path) -> None:
    contact.ask("folder", path=str(tmp_path), will_be_made=False, mark=".m1")
    process = contact._process
    assert process is not None
    os.kill(process.pid, signal.SIGHUP)
    process.wait(5)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HostError, match="asked for clock"):
        contact.ask("clock")


def test_a_python_that_cannot_be_used() -> None:
    with pytest.raises(FileNotFoundError):
        Contact("here", None, "/no/such/python", {}).start()
    contact = Contact("here", None, "/bin/false", {})
    with pytest.raises(HostError, match="ended with exit code 1"):
        contact.start()
    contact.close()


def test_names_that_nobody_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_network.threads({"a": lambda: 1, "b": lambda: time.sleep(0.5)}, 0.1, "late") == {
        "a": 1,
        "b": "late",
    }
    monkeypatch.setattr(probe_network, "RESOLVE_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5) or [])
    assert probe_network.resolve("slow")["error"] == "no answer within 0 s"


def test_addresses_of_ipv4_in_ipv6_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, 0, 0, "", ("10.0.0.1", 0)), (0, 0, 0, "", ("::ffff:10.0.0.1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: told)
    assert probe_network.resolve("d1") == {"addresses": ["10.0.0.1"], "error": None}
    assert json.dumps(interfaces())  # what is told can be sent
