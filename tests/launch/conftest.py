"""Jobs whose processes can be found again wherever they went, and the promise that none is left
after a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allhands.launch import idle_agents, plan
from tests.patience import patience

MARKER = "ALLHANDS_TEST_JOB"


def alive(mark: str) -> list[int]:
    """Every process, other than this one, that was started with the mark in its environment."""
    wanted = f"{MARKER}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie's environment is empty: it does not count as alive.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + patience(seconds)
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture(autouse=True)
def every_agent_ends_with_its_call(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """But in tests that are about something else. Those of other tests wait on, unused."""
    if "preloaded" not in request.fixturenames:
        monkeypatch.delenv("ALLHANDS_AGENT_IDLE", raising=False)


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[None]:
    """The calls of `spawn` in this file share an agent, which imports torch once; fails when a
    process outlives them all."""
    with pytest.MonkeyPatch.context() as patch:
        value = uuid.uuid4().hex
        patch.setenv(MARKER, value)
        patch.setenv("OMP_NUM_THREADS", "1")
        with idle_agents.kept(300):
            yield
        idle_agents.end_all()
        none_is_left(value)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process that is started during the test; fails the test when one outlives it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield value
    none_is_left(value)


def none_is_left(mark: str) -> None:
    """End all processes with the mark; fails when there are some that do not end themselves."""
    gone = wait_until(lambda: not alive(mark), 5)
    left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in alive(mark)}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert gone, f"processes left behind: {left}"


# A parameter server that only tells who it is, and needs no torch.
SERVER = """
import json, os, signal
ours = {name: value for name, value in os.environ.items() if name.startswith("ALLHANDS_")}
with open("servers", "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "parent": os.getppid(), **ours}) + "\\n")
print("serving", flush=True)
while True:
    signal.pause()
"""


def told_servers(count: int) -> list[dict[str, Any]]:
    """What the servers of `fake_servers` wrote into the working folder, once there are `count`
    lines."""
    path = Path("servers")
    if not wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, 10):
        raise TimeoutError(
            f"{count} servers are awaited, and there are: "
            f"{path.read_text() if path.exists() else 'none'}"
        )
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def fake_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spawn(servers=)` starts SERVER in an empty folder."""
    (tmp_path / "fake_server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "SERVER", "fake_server")


class Job:
    """Starts `allhands launch` on scripts that are written for the test."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark, self.folder = mark, folder
        self.before = ""  # what the launcher's process does first

    def fake_servers(self) -> None:
        """Let the servers of this job be those of SERVER."""
        self.script(SERVER, "fake_server.py")
        self.before = "from allhands.launch import plan; plan.SERVER = 'fake_server'; "

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"{self.before}from allhands.cli.main import main; main()",
                "launch",
                *words,
            ],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A test run in the background of a shell ignores SIGINT, and so would the launcher.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509
        )

    def run(self, *words: str, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a whole job."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=patience(timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return (
            process.returncode,
            out.decode("utf-8", "surrogateescape"),
            err.decode("utf-8", "surrogateescape"),
        )

    def alive(self) -> list[int]:
        return alive(self.mark)


@pytest.fixture
def job(mark: str, tmp_path: Path) -> Job:
    return Job(mark, tmp_path)
