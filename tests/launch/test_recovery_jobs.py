"""A job with parameter servers goes on where it was told to: without a worker, or with a worker or
a server that was started again."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

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
