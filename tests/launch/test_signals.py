"""Signals that ask a job to save and leave: they reach the workers, which get the time for it, and
that is no failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from allhands.launch import processes
from tests.launch.conftest import wait_until
from tests.patience import patience

pytestmark = [
    pytest.mark.serial,
    pytest.mark.usefixtures("mark"),
    pytest.mark.usefixtures("forked_python"),
]

# Workers that save for a while, rank 1 for longer, and leave as a training does. Rank 0 tells rank
# 1, as ranks that agree do.
SAVES = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
# set up
count = 0
def save(number, _):
    global count
    count += 1
    if count > 1:
        return
    open(f"{number}", "w").close()
    time.sleep(0.5 + rank)
    print("saved after", signal.Signals(number).name, count, flush=True)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
print("up", os.getpid(), flush=True)
while True:
    time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if os.path.exists(f"{number}"):
            save(number, None)
"""


def start(job: Any, script: str, *options: str) -> tuple[subprocess.Popen[bytes], dict[int, int]]:
    """A job of two workers that are up, and their process ids by rank."""
    process = job.start("-n", "2", *options, job.script(script))
    pids = {}
    for _ in range(2):
        mark, _, pid = process.stdout.readline().decode().split()
        pids[int(mark[1])] = int(pid)
    return process, pids


def finish(process: subprocess.Popen[bytes]) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=patience(30))
    return process.returncode, sorted(out.decode().splitlines()), err.decode().splitlines()


@pytest.mark.parametrize(
    ("number", "whom", "line"),
    [
        (signal.SIGTERM, "launcher", "stopped by SIGTERM"),
        (signal.SIGUSR1, "launcher", "the workers stopped after SIGUSR1"),
        (signal.SIGTERM, "rank 0", "the workers stopped after SIGTERM"),
    ],
)
def test_workers_that_save_and_leave_are_no_failure(
    job: Any, number: signal.Signals, whom: str, line: str
) -> None:
    process, pids = start(job, SAVES, "--no-preload")
    os.kill(process.pid if whom == "launcher" else pids[0], number)
    saved = [f"[{rank}] saved after {number.name} 1" for rank in range(2)]
    assert finish(process) == (128 + number, saved, [f"allhands: {line}; no worker is left"])


# The store is used after the signal: it has to be there while the workers save.
USES_THE_STORE = SAVES.replace(
    "# set up",
    """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
""",
).replace(
    "time.sleep(0.5 + rank)",
    """
    store.set(f"saved {rank}", "")
    store.wait(["saved 0", "saved 1"])
    time.sleep(2.5)
""",
)


# What stands for a new interpreter passes signals on, so that a fork of it would get each twice.
@pytest.mark.usefixtures("new_python")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.rare), signal.SIGUSR1]
)
def test_a_scheduler_may_signal_every_process_of_the_job(job: Any, number: signal.Signals) -> None:
    process, _ = start(job, USES_THE_STORE, "--grace", "60")
    for pid in job.alive():  # launcher, agent, store, workers
        os.kill(pid, number)
    code, out, err = finish(process)
    line = "stopped by SIGTERM" if number == signal.SIGTERM else "the workers stopped after SIGUSR1"
    assert (code, err) == (128 + number, [f"allhands: {line}; no worker is left"])
    assert [text[: -len(" 1")] for text in out] == [
        f"[{rank}] saved after {number.name}" for rank in range(2)
    ]
    if number == signal.SIGUSR1:
        assert [text[-1] for text in out] == ["1", "1"], "each worker got it once"


def test_a_signal_that_the_workers_only_note_changes_nothing(job: Any) -> None:
    script = (
        "import os, signal, time\ngot = []\nsignal.signal(signal.SIGUSR2, lambda *_: "
        "got.append(1))\n"
        "print('up', os.getpid(), flush=True)\nwhile not got: "
        "time.sleep(0.02)\ntime.sleep(0.5)\nprint('got', len(got))"
    )
    process, _ = start(job, script, "--no-preload")
    process.send_signal(signal.SIGUSR2)
    assert finish(process) == (0, ["[0] got 1", "[1] got 1"], [])


def test_a_worker_that_does_not_follow_is_ended_after_the_grace(job: Any) -> None:
    script = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', "
        "os.getpid(), flush=True)\n"
        "if os.environ['RANK'] == '0': time.sleep(0.2); sys.exit(143)\ntime.sleep(60)"
    )
    started = time.monotonic()
    process, _ = start(job, script, "--no-preload", "--grace", "1")
    code, _, err = finish(process)
    assert (code, time.monotonic() - started < patience(15)) == (143, True)
    line = (
        "allhands: the workers stopped after SIGTERM; rank 1 had not ended in time and got "
        "SIGKILL; no worker is left"
    )
    assert err == [line]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.rare)]
)
def test_a_worker_that_a_signal_kills_has_failed(job: Any, number: signal.Signals) -> None:
    script = "import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(60)"
    process, pids = start(job, script, "--no-preload")
    os.kill(pids[1], number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert (
        err[0]
        == f"allhands: rank 1 ({os.uname().nodename}, pid {pids[1]}) failed first: killed by "
        f"{number.name}"
    )


def test_a_failure_while_others_stop_is_one(job: Any) -> None:
    script = (
        "import os, sys, time\nprint('up', os.getpid(), flush=True)\n"
        "if os.environ['RANK'] == '0': sys.exit(143)\ntime.sleep(1)\nraise OSError('disk is full')"
    )
    process, _ = start(job, script, "--no-preload")
    code, _, err = finish(process)
    report = err[next(index for index, line in enumerate(err) if line.startswith("allhands: ")) :]
    assert code == 1
    assert report[0].endswith("failed first: raised OSError: disk is full")
    assert "rank 0 had already left with exit code 143, " in report[1]


# While the job starts, starts again, or stops


# Stands for torch, which the agent imports before it forks workers.
SLOW_IMPORT = """
import os, time
open("importing", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGUSR2, marks=pytest.mark.rare),
        pytest.param(signal.SIGTERM, marks=pytest.mark.rare),
        signal.SIGINT,
    ],
)
def test_a_signal_before_any_worker_is_there_ends_the_job(job: Any, number: signal.Signals) -> None:
    job.script(SLOW_IMPORT, "torch.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(job.folder))
        process = job.start("-n", "2", job.script("print('trained')"))
    assert wait_until((job.folder / "importing").exists, 30)
    process.send_signal(number)
    line = f"allhands: stopped by {number.name}; no worker is left"
    assert finish(process) == (128 + number, [], [line])


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.rare)]
)
def test_a_signal_that_only_the_agent_gets_before_any_worker_is_there(
    job: Any, number: signal.Signals
) -> None:
    """As from a scheduler that signals the steps of a job, and not the script that started them."""
    slow = (
        SLOW_IMPORT.replace("60", "0.1")
        .replace("import os, time", "import os, signal, time")
        .replace("time.sleep", "while not os.path.exists('signalled'): time.sleep")
    )
    job.script(slow, "torch.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(job.folder))
        process = job.start("-n", "2", job.script("print('trained')"))
    assert wait_until(
        lambda: (
            (job.folder / "importing").exists() and (job.folder / "importing").read_text() != ""
        ),
        30,
    )
    os.kill(int((job.folder / "importing").read_text()), number)
    (job.folder / "signalled").touch()
    code, out, err = finish(process)
    assert (code, out, err[-1]) == (
        128 + number,
        [],
        f"allhands: stopped by {number.name}; no worker is left",
    )


def test_a_signal_while_the_workers_are_stopped_keeps_them_from_being_started_again(
    job: Any,
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n    print('stopping 1 1', flush=True)\n    time.sleep(0.5)\n    "
        "sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up', os.getpid(), flush=True)\n"
        "while os.environ['RANK'] == '1': time.sleep(0.05)\n"
        "while not os.path.exists('fail'): time.sleep(0.05)\nraise OSError('disk is full')"
    )
    process, _ = start(job, script, "--no-preload", "--max-restarts", "3")
    (job.folder / "fail").touch()
    assert process.stdout.readline() == b"[1] stopping 1 1\n"
    process.send_signal(signal.SIGUSR1)
    code, out, err = finish(process)
    assert (code, out, err[-1]) == (138, [], "allhands: stopped by SIGUSR1; no worker is left")


def test_servers_outlive_the_signals_that_ask_workers_to_save(job: Any) -> None:
    job.fake_servers()
    process = job.start("-n", "2", "-s", "1", "--no-preload", job.script(SAVES))
    lines = [process.stdout.readline().decode() for _ in range(3)]
    assert "[server 0] serving\n" in lines
    for pid in job.alive():
        if pid != process.pid:  # the launcher alone would pass it on to the workers only
            os.kill(pid, signal.SIGUSR1)
    code, out, err = finish(process)
    assert (code, err) == (138, ["allhands: the workers stopped after SIGUSR1; no worker is left"])
    assert out == [f"[{rank}] saved after SIGUSR1 1" for rank in range(2)]


@pytest.mark.usefixtures("new_python")
def test_signals_wait_until_a_new_process_takes_them() -> None:
    code = (
        "import sys\nfrom allhands.launch.processes import "
        "take_signals\nsys.stdin.readline()\nprint('here', flush=True)\n"
        "take_signals()\nprint('too far')"
    )
    with processes.held_signals():
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    child.send_signal(signal.SIGUSR1)
    assert (child.communicate("go\n", timeout=patience(30))[0], child.returncode) == (
        "here\n",
        -signal.SIGUSR1,
    )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
