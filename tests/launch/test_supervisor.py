"""Which worker is blamed where the news of several failures comes from several hosts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from allhands.launch import supervisor as module
from allhands.launch.handle import AgentHandle
from allhands.launch.output import Output
from allhands.launch.supervisor import Supervisor
from allhands.wire import LineReader, encode
from tests.patience import patience

ECHO = {"text": "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:40000"}


class FakeHost:
    """A host whose agent says what the test says."""

    def __init__(self, name: str) -> None:
        requests, self.stdin = os.pipe()
        self.stdout, self._events = os.pipe()
        self._requests, self._inbox = requests, LineReader()
        process: Any = _Pipes(self.stdin, self.stdout)
        self.handle = AgentHandle(process, name, local=False)

    def tell(self, **event: Any) -> None:
        os.write(self._events, encode(event))

    def fails(self, rank: int, code: int, how: str, value: Any) -> None:
        """Its worker fails, and ends by itself."""
        self.tell(event=how, rank=rank, value=value)
        self.tell(event="exit", rank=rank, own=True, code=code)

    def asked(self, op: str) -> None:
        """Wait until it is asked for something."""
        while not any(one["op"] == op for one in self._inbox.feed(os.read(self._requests, 65536))):
            pass


class _Pipes:
    def __init__(self, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.fixture
def hosts() -> Iterator[tuple[Supervisor, FakeHost, FakeHost]]:
    first, second = FakeHost("d1"), FakeHost("d2")
    supervisor = Supervisor([first.handle, second.handle], Output(True, None), host_timeout=60.0)
    yield supervisor, first, second
    supervisor.close()


def run(supervisor: Supervisor, script: Any) -> Any:
    """The worker that is blamed; `script` says what happens meanwhile."""
    thread = threading.Thread(target=script)
    env = {"TORCHELASTIC_RESTART_COUNT": "0"}
    thread.start()
    blamed = supervisor.run([[{"rank": 0, "env": env}], [{"rank": 1, "env": env}]])
    thread.join()
    return blamed


def test_a_broken_connection_is_not_blamed_before_its_cause_has_arrived(
    hosts: tuple[Supervisor, FakeHost, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_AWAY", patience(30))
    supervisor, first, second = hosts

    def script() -> None:
        second.asked("start")
        first.fails(0, 1, "raised", ECHO)
        time.sleep(1.0)
        second.fails(1, 3, "leaving", 3)
        first.asked("stop")
        first.tell(event="idle")
        second.tell(event="idle")

    blamed = run(supervisor, script)
    assert (blamed.rank, blamed.exit_code()) == (1, 3)


def test_a_broken_connection_is_blamed_where_nobody_else_can_be(
    hosts: tuple[Supervisor, FakeHost, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_AWAY", patience(300))  # which the test does not wait for
    supervisor, first, second = hosts

    def script() -> None:
        second.asked("start")
        first.fails(0, 1, "raised", ECHO)
        second.fails(1, 1, "raised", ECHO)
        first.asked("stop")
        first.tell(event="idle")
        second.tell(event="idle")

    assert run(supervisor, script).rank == 0


@pytest.mark.parametrize(
    ("value", "longest"), [(ECHO, 0.5), ({"text": "ValueError: 7"}, 300.0)], ids=["echo", "other"]
)
def test_the_others_are_stopped_at_once_or_after_a_while(
    hosts: tuple[Supervisor, FakeHost, FakeHost],
    monkeypatch: pytest.MonkeyPatch,
    value: dict[str, str],
    longest: float,
) -> None:
    monkeypatch.setattr(module, "_LONGEST_AWAY", longest)
    supervisor, first, second = hosts

    def script() -> None:
        second.asked("start")
        first.fails(0, 1, "raised", value)
        second.asked("stop")
        second.tell(event="exit", rank=1, own=False, signal=15)
        first.tell(event="idle")
        second.tell(event="idle")

    assert run(supervisor, script).rank == 0
