"""Agents that wait for the next call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from allhands.errors import UserError, WorkerError
from allhands.launch import idle_agents, spawn
from tests.patience import patience

pytestmark = pytest.mark.serial


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    yield
    idle_agents.end_all()


def agent() -> int:
    return os.getppid()


@pytest.mark.rare
def test_an_agent_is_used_again_only_where_nothing_that_it_fixed_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(idle_agents.VARIABLE, "300")
    (first, other) = spawn(agent, workers=2)
    assert first == other

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(WorkerError):
        spawn(fail, workers=2)
    assert spawn(agent, workers=2) == [first, first]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(spawn(agent, workers=2)))
    thread.start()
    thread.join()
    assert found == [[first, first]]
    # As many threads a worker; another variable; another number of threads.
    assert spawn(agent, workers=4)[0] != first
    monkeypatch.setenv("SOMETHING", "else")
    assert spawn(agent, workers=2)[0] != first
    monkeypatch.delenv("SOMETHING")
    assert spawn(agent, workers=2, threads=3)[0] != first
    assert spawn(agent, workers=2)[0] == first


# rare: test_spawn.py has an agent that waits, for calls of which some fail.
@pytest.mark.rare
def test_a_call_that_is_refused_leaves_no_answer_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(idle_agents.VARIABLE, "300")
    for _ in range(2):
        with pytest.raises(UserError):
            # Cannot be sent, while the agent still prepares.
            spawn(agent, (threading.Lock(),), workers=2)
        assert len(spawn(agent, workers=2)) == 2


# rare: each worker is forked anew; test_spawn.py has many of one agent.
@pytest.mark.rare
def test_workers_are_as_clean_as_those_of_a_new_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(idle_agents.VARIABLE, "300")

    def soil() -> bool:
        import json

        clean = not hasattr(json, "soiled") and "SOILED" not in os.environ
        json.soiled = True  # type: ignore[attr-defined]
        os.environ["SOILED"] = "1"
        os.chdir("/")
        return clean

    assert spawn(soil, workers=1) == [True]
    monkeypatch.chdir(tmp_path)
    assert spawn(soil, workers=1) == [True]
    assert spawn(os.getcwd, workers=1) == [str(tmp_path)]


# rare: the fixture `shared_agent` ends one with its context, and looks for what is left.
@pytest.mark.rare
def test_it_ends_by_itself_and_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(idle_agents.VARIABLE, "2.5")
    (pid,) = spawn(agent, workers=1)
    assert psutil.pid_exists(pid)
    deadline = time.monotonic() + patience(15)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    with idle_agents.kept(300):
        (other,) = spawn(agent, workers=1)
        assert other != pid, "one that has ended is not used"
        monkeypatch.delenv(idle_agents.VARIABLE)
        (pid,) = spawn(agent, workers=1)
        assert spawn(agent, workers=1) == [pid]
    assert not psutil.pid_exists(pid)
    (pid,) = spawn(agent, workers=1)
    assert not psutil.pid_exists(pid)


def test_it_ends_with_the_process_that_started_it() -> None:
    code = "import os\nfrom allhands.launch import spawn\n"
    code += "print(spawn(os.getppid, workers=1)[0], flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, idle_agents.VARIABLE: "60"},
        capture_output=True,
        check=False,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + patience(5)
    while (
        psutil.pid_exists(pid)
        and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(idle_agents.VARIABLE, "soon")
    with pytest.raises(
        UserError, match="ALLHANDS_AGENT_IDLE='soon': it must be a number of seconds"
    ):
        spawn(agent, workers=1)


def test_the_variables_old_name_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(idle_agents.VARIABLE, raising=False)
    monkeypatch.setenv("ALLHANDS_KEEPER_IDLE", "5")
    with pytest.warns(FutureWarning, match="write ALLHANDS_AGENT_IDLE"):
        assert idle_agents.idle_seconds() == 5.0
    monkeypatch.setenv(idle_agents.VARIABLE, "7")
    assert idle_agents.idle_seconds() == 7.0
