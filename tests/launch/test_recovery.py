"""A job with parameter servers goes on where it was told to: without a worker, or with a worker or
a server that was started again."""

from __future__ import annotations

import json
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.errors import UserError
from allhands.launch.options import Options
from allhands.launch.output import Output
from allhands.launch.recovery import Recovery
from allhands.launch.worker_report import Worker
from tests.patience import patience

from .conftest import Job, wait_until

pytestmark = pytest.mark.serial

# What the workers of all jobs begin with. None of them needs torch.
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
restart = int(os.environ["ALLHANDS_WORKER_RESTART"])


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def lines(name):
    lines = Path(name).read_text().splitlines() if Path(name).exists() else []
    return [json.loads(line) for line in lines]


def kill_self(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(30)
"""


@pytest.fixture
def served(job: Job) -> Job:
    job.fake_servers()
    return job


def reports(err: str) -> list[str]:
    return [
        re.sub(r"\(\S+, pid \d+\)", "(HOST)", line)
        for line in err.splitlines()
        if line.startswith("allhands: ")
    ]


HOST = os.uname().nodename
OOM = " (out of memory? see `dmesg`)"


def test_a_server_that_dies_is_started_again_until_there_were_enough(served: Job) -> None:
    script = served.script(
        BEGIN
        + """
for times in range(3):
    until(lambda: len(lines("servers")) == 2 + times)
    newest = {one["ALLHANDS_SERVER"]: one for one in lines("servers")}
    if times == 1:
        secret = newest["0"]["ALLHANDS_TOKEN"].encode()
        commands = Path("/proc").glob("[0-9]*/cmdline")
        found = [path.name for path in commands if secret in path.read_bytes()]
        print("in command lines", found, flush=True)
    os.kill(newest["1" if times != 1 else "0"]["pid"], signal.SIGKILL)
time.sleep(30)
"""
    )
    code, out, err = served.run(
        "-n", "1", "-s", "2", "--server-restarts", "2", "--no-preload", "--log-dir", "logs", script
    )
    assert code == 137
    told = reports(err)
    assert told[:-1] == [
        f"allhands: server {number} on host {HOST} was killed by SIGKILL{OOM}; started again "
        f"({times} of 2)"
        for number, times in ((1, 1), (0, 2))
    ]
    assert told[-1] == f"allhands: server 1 (HOST) failed first: killed by SIGKILL{OOM}"
    started = [json.loads(line) for line in (served.folder / "servers").read_text().splitlines()]
    names = ("ALLHANDS_SERVER", "ALLHANDS_SERVER_RESTART", "ALLHANDS_ON_WORKER_FAILURE")
    assert sorted(tuple(one[name] for name in names) for one in started[:2]) == [
        ("0", "0", "stop"),
        ("1", "0", "stop"),
    ]
    assert [tuple(one[name] for name in names) for one in started[2:]] == [
        ("1", "1", "stop"),
        ("0", "1", "stop"),
    ]
    (secret,) = {one["ALLHANDS_TOKEN"] for one in started}
    assert len(secret) == 64
    assert "in command lines []" in out
    logs = [path.read_text() for path in (served.folder / "logs").iterdir()]
    assert len(logs) == 3
    assert not [text for text in (out, err, *logs) if secret in text]


def test_the_others_go_on_without_workers_that_fail(served: Job) -> None:
    script = served.script(
        BEGIN
        + """
Path(f"pid-{rank}").write_text(str(os.getpid()))
until(lambda: len(list(Path().glob("pid-*"))) == 4)
time.sleep(0.2)
if rank == 1:
    kill_self()
if rank == 2:
    raise ValueError("planted")
if rank == 3:
    kill_self(signal.SIGSTOP)
others = [Path(f"pid-{other}").read_text() for other in (1, 2, 3)]
until(lambda: not any(Path("/proc", pid).exists() for pid in others))
print("alone", os.environ["ALLHANDS_ON_WORKER_FAILURE"], flush=True)
"""
    )
    code, out, err = served.run(
        "-n", "4", "-s", "1", "--on-worker-failure", "continue", "--no-preload", script
    )
    assert (code, "[0] alone continue" in out) == (0, True), err
    stopped = "no progress for N s: it is stopped (state T), by SIGSTOP or a debugger"
    *told, last = reports(re.sub(r"no progress for \d+ s", "no progress for N s", err))
    assert sorted(told) == [
        f"allhands: rank 1 on host {HOST} was killed by SIGKILL{OOM}; the others go on",
        f"allhands: rank 2 on host {HOST} failed: raised ValueError: planted; the others go on",
        f"allhands: rank 3 on host {HOST} failed: {stopped}; the others go on",
    ]
    assert last == (
        f"allhands: 3 of 4 workers failed, and the others came to their end: rank 1 ({HOST}): "
        f"killed by SIGKILL{OOM}; "
        f"rank 2 ({HOST}): raised ValueError: planted; rank 3 ({HOST}): {stopped}"
    )
    assert "    | ValueError: planted" in err


def test_when_no_worker_is_left_the_first_failure_decides(served: Job) -> None:
    script = served.script(BEGIN + "time.sleep(rank)\nsys.exit(3 + rank)")
    code, _, err = served.run(
        "-n", "2", "-s", "1", "--on-worker-failure", "continue", "--no-preload", script
    )
    assert code == 3
    assert reports(err)[-1] == "allhands: rank 0 (HOST) failed first: exit code 3"
    assert "  failed after it: rank 1" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_waits_for_the_others_ends_as_ever(
    served: Job, number: signal.Signals
) -> None:
    # Rank 0 has begun when it is stopped: a signal that meets a process before its program has
    # begun can be lost.
    script = served.script(
        BEGIN
        + """
if rank == 1:
    until(lambda: Path("begun").exists())
    kill_self()
Path("begun").touch()
time.sleep(60)
"""
    )
    process = served.start(
        "-n", "2", "-s", "1", "--on-worker-failure", "continue", "--no-preload", script
    )
    assert process.stderr is not None
    assert b"rank 1 on host" in process.stderr.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=patience(20))
    if number == signal.SIGINT:
        assert (process.returncode, err) == (
            130,
            b"allhands: stopped by SIGINT; no worker is left\n",
        )
    assert wait_until(lambda: not served.alive(), 5)


def test_a_worker_is_started_again_while_the_others_run_on(served: Job) -> None:
    script = served.script(
        BEGIN
        + """
with open("workers", "a") as file:
    file.write(json.dumps([rank, restart, os.environ["ALLHANDS_ON_WORKER_FAILURE"]]) + "\\n")
if rank == 1:
    if restart == 0:
        kill_self()
    if restart == 1:
        raise KeyError("planted")
    until(lambda: Path("seen").exists())
    sys.exit(5)
until(lambda: [1, 2, "restart"] in lines("workers"))
Path("seen").touch()
time.sleep(30)
"""
    )
    words = (
        "-n",
        "2",
        "-s",
        "1",
        "--on-worker-failure",
        "restart",
        "--max-restarts",
        "2",
        "--no-preload",
        script,
    )
    code, _, err = served.run(*words)
    assert code == 5, err
    assert reports(err) == [
        f"allhands: rank 1 on host {HOST} was killed by SIGKILL{OOM}; started again (1 of 2)",
        f"allhands: rank 1 on host {HOST} failed: raised KeyError: 'planted'; started again (2 of "
        "2)",
        "allhands: rank 1 (HOST) failed first: exit code 5",
    ]
    started = [
        json.loads(line)[:2] for line in (served.folder / "workers").read_text().splitlines()
    ]
    assert sorted(started) == [[0, 0], [1, 0], [1, 1], [1, 2]], "rank 0 ran on"
    assert len((served.folder / "servers").read_text().splitlines()) == 1


def test_the_store_outlives_a_moment_without_any_process(served: Job) -> None:
    script = served.script(
        BEGIN
        + """
import socket
until(lambda: len(lines("servers")) == 1 + restart)
if restart == 0:
    os.kill(lines("servers")[0]["pid"], signal.SIGKILL)
    kill_self()
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
print("both are back", flush=True)
"""
    )
    # A launcher that is slow to answer, as one on another host may be.
    served.before += (
        "import time; from allhands.launch.recovery import Recovery as R; again = R._start_again; "
    )
    served.before += "R._start_again = lambda *given: (time.sleep(0.5), again(*given)); "
    words = (
        "-n 1 -s 1 --server-restarts 1 --on-worker-failure restart --max-restarts 1 --no-preload"
    )
    code, out, err = served.run(*words.split(), script)
    assert (code, out.count("both are back")) == (0, 1), err
    assert sorted(line.partition(" on ")[0] for line in reports(err)) == [
        "allhands: rank 0",
        "allhands: server 0",
    ]


class Stage:
    """Two hosts with a worker each, and a server on those of `servers`; nothing runs."""

    def __init__(self, servers: tuple[int, ...], **options: Any) -> None:
        self.said: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.recovery = Recovery(**options, say=self.said.append)
        ranks = [
            [*(-1 - number for number, host in enumerate(servers) if host == index), index]
            for index in range(2)
        ]
        self.agents: list[Any] = [
            SimpleNamespace(
                ranks=there,
                lost=False,
                local=False,
                host=f"d{index}",
                send=lambda **asked: self.sent.append(asked),
            )
            for index, there in enumerate(ranks)
        ]
        self.workers = {
            rank: Worker(rank, agent.host) for agent in self.agents for rank in agent.ranks
        }
        env = {"TORCHELASTIC_RESTART_COUNT": "0"}
        tasks = [[{"rank": rank, "env": env} for rank in there] for there in ranks]
        self.recovery.begin(self.agents, self.workers, tasks, Output(), grace=5.0)

    def lose(self, host: int) -> list[int]:
        """The ranks that are blamed for the end when a host is lost."""
        self.agents[host].lost = True
        for rank in self.agents[host].ranks:
            self.workers[rank].lost, self.workers[rank].lost_at = "no word from it", 1.0
        self.recovery.act()
        return [worker.rank for worker in self.recovery.blamed()]


def test_a_lost_host_counts_as_its_workers_unless_it_carries_more() -> None:
    going_on = Stage((0,), on_worker_failure="continue")
    assert going_on.lose(1) == []
    assert going_on.said == ["rank 1 on host d1 failed: no word from it; the others go on"]
    assert [worker.rank for worker in going_on.recovery.excused()] == [1]
    assert Stage((0,), on_worker_failure="continue").lose(0) == [-1, 0], (
        "the first host carries the store"
    )
    assert Stage((0, 1), on_worker_failure="continue", server_restarts=9).lose(1) == [-2, 1], (
        "a server is not moved"
    )
    assert Stage((0,), on_worker_failure="restart", max_restarts=9).lose(1) == [1], (
        "a worker is not moved"
    )


def test_restarts_are_counted_together_and_only_while_they_help() -> None:
    stage = Stage((0, 1), on_worker_failure="restart", max_restarts=1, server_restarts=1)
    for rank in (0, 1, -1, -2):
        stage.workers[rank].exit, stage.workers[rank].exit_at = {"code": 7}, 5.0
    stage.recovery.act()
    assert [asked["worker"]["env"] for asked in stage.sent] == [
        {"TORCHELASTIC_RESTART_COUNT": "0", "ALLHANDS_WORKER_RESTART": "1"},
        {"TORCHELASTIC_RESTART_COUNT": "0", "ALLHANDS_SERVER_RESTART": "1"},
    ]
    assert {worker.rank for worker in stage.recovery.blamed()} == {-2, 1}
    late = Stage((0,), server_restarts=1)
    for rank in (0, 1):
        late.workers[rank].exit = {"code": 0}
    late.workers[-1].exit = {"code": 7}
    late.recovery.act()
    assert late.sent == [], "no worker is left that needs it"


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("RuntimeError: gloo: Connection reset by peer", True),
        ("WorldError: the members of the world have changed again", True),
        ("WorldError: this worker cannot take part: its script is another version", False),
    ],
)
def test_one_that_is_interrupted_as_it_joins_is_started_again(text: str, starts: bool) -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    members = stage.recovery.members
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    members.take_up(0, 1, repeated=True)
    stage.recovery.act()
    members.ask_to_join(1)
    assert members.ranks == [0, 1]
    assert not members.trains(1)
    stage.sent.clear()
    worker = stage.workers[1]
    worker.note("raised", {"value": {"text": text}}, 1.0)
    worker.note("exit", {"code": 1, "own": True}, 1.0)
    stage.recovery.act()
    members.take_up(0, members.epoch, repeated=True)
    stage.recovery.act()
    assert any(asked["op"] == "again" for asked in stage.sent) == starts
    assert not stage.recovery.blamed()


def test_a_lost_worker_starts_once_the_others_have_repeated_what_was_interrupted() -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    stage.recovery.members.take_up(0, 1)
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish"]
    stage.recovery.members.take_up(0, 1, repeated=True)
    stage.recovery.act()
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish", "again"]


def test_it_starts_without_them_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allhands.launch.recovery._START_BY_S", 0.0)
    stage = Stage((), elastic=True, max_restarts=9)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish", "again"]


def test_those_that_are_left_are_told_that_nobody_goes_on() -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    stage.recovery.members.lay_out(2, 1)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    stage.recovery.act()
    told = [asked["key"] for asked in stage.sent if asked["op"] == "publish"]
    assert told == ["attempt0/elastic/over"]
    assert [worker.rank for worker in stage.recovery.blamed()] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_restarts": -1, "servers": 1}, "server_restarts=-1: it must be at least 0"),
        (
            {"server_restarts": 3},
            "servers=0; start some (-s 1), or write max_restarts (--max-restarts)",
        ),
        (
            {"on_worker_failure": "ignore", "servers": 1},
            "'ignore'; it must be one of 'stop', 'continue', 'restart'",
        ),
        (
            {"on_worker_failure": "continue"},
            "needs parameter servers: workers that talk to one another in collectives cannot",
        ),
        (
            {"on_worker_failure": "restart", "max_restarts": 2},
            "or write max_restarts (--max-restarts) alone",
        ),
        (
            {"on_worker_failure": "restart", "servers": 1},
            "without max_restarts: set how many times (--max-restarts 3)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Options(**options).check()
