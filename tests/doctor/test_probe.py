"""The probe as it runs on a host: here, without ssh, with nothing but what it is sent."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from allhands.doctor import probe
from allhands.doctor.contact import Contact
from allhands.errors import HostError

pytestmark = pytest.mark.serial

TOKEN = "0123456789abcdef"


@pytest.fixture
def contact() -> Iterator[Contact]:
    found = Contact("here", None, sys.executable, {"OMP_NUM_THREADS": "3"})
    found.start()
    yield found
    found.close()


def test_the_text_that_is_sent_is_read_by_the_oldest_python_that_may_answer() -> None:
    compile(Path(probe.__file__).read_text(), "probe", "exec")
    # A host may lack it.
    assert "import allhands" not in Path(probe.__file__).read_text().split("def ")[0]


def test_a_host_without_allhands_and_torch_answers_too() -> None:
    questions = (
        b'{"op": "facts"}\n{"op": "listen", "token": "x"}\n{"op": "connect", "token": "x", '
        b'"targets": []}\n'
    )
    program = Path(probe.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], input=questions, capture_output=True
    )
    facts, listening, connected = [json.loads(line)["answer"] for line in done.stdout.splitlines()]
    assert facts["versions"] == {
        "Python": platform.python_version(),
        "torch": None,
        "allhands": None,
        "numpy": None,
        "CUDA": None,
    }
    assert listening["port"] > 0
    assert connected == []
    assert done.stderr == b""


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
    assert not contact.is_up


def test_listening_and_flooding(contact: Contact) -> None:
    port = contact.ask("listen", token=TOKEN)["port"]
    got = contact.ask("flood", address="127.0.0.1", port=port, token=TOKEN, seconds=0.2)
    assert got["bytes"] > 0
    assert got["bytes"] % probe.CHUNK == 0  # all that was sent
    assert 0.1 < got["seconds"] < 5
    # A stranger gets no answer.
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b"x" * len(TOKEN) + b"k")
        assert stranger.recv(1) == b""


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
    monkeypatch.setattr(probe, "own_addresses", dict)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(5)
        monkeypatch.setattr(probe, "CONNECT_S", 0.2)
        monkeypatch.setattr(
            probe, "resolve", lambda name: {"addresses": ["0.0.0.0"], "error": None}
        )
        assert probe.knock("other", silent.getsockname()[1], TOKEN)["error"] == "timed out"
        good = probe.knock("other", port, TOKEN)
    assert (good["error"], good["address"], good["own"]) == (None, "0.0.0.0", "127.0.0.1")
    assert probe.knock("other", port, "another token")["error"] in (
        "something else answers there",
        "timed out",
    )


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
    assert probe.threads({"a": lambda: 1, "b": lambda: time.sleep(0.5)}, 0.1, "late") == {
        "a": 1,
        "b": "late",
    }
    monkeypatch.setattr(probe, "RESOLVE_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5) or [])
    assert probe.resolve("slow")["error"] == "no answer within 0 s"


def test_addresses_of_ipv4_in_ipv6_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, 0, 0, "", ("10.0.0.1", 0)), (0, 0, 0, "", ("::ffff:10.0.0.1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: told)
    assert probe.resolve("d1") == {"addresses": ["10.0.0.1"], "error": None}
    assert json.dumps(probe.interfaces())  # what is told can be sent
