"""Signals that ask a job to save and leave: they reach the workers, which get the time for it, and that is no failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from allhands.errors import WorkerError
from allhands.launch import spawn, worker

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("mark")]

# Workers that save for a while, rank 1 for longer, and leave as a training does. Rank 0 tells rank 1, as ranks that agree do.
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
    out, err = process.communicate(timeout=30)
    return process.returncode, sorted(out.decode().splitlines()), err.decode().splitlines()


@pytest.mark.parametrize(
    ("number", "whom", "line"),
    [
        (signal.SIGTERM, "launcher", "stopped by SIGTERM"),
        (signal.SIGUSR1, "launcher", "the workers stopped after SIGUSR1"),
        (signal.SIGTERM, "rank 0", "the workers stopped after SIGTERM"),
    ],
)
def test_workers_that_save_and_leave_are_no_failure(job: Any, number: signal.Signals, whom: str, line: str) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_may_signal_every_process_of_the_job(job: Any, number: signal.Signals) -> None:
    process, _ = start(job, USES_THE_STORE)
    for pid in job.alive():  # launcher, keeper, store, workers
        os.kill(pid, number)
    code, out, err = finish(process)
    line = "stopped by SIGTERM" if number == signal.SIGTERM else "the workers stopped after SIGUSR1"
    assert (code, err) == (128 + number, [f"allhands: {line}; no worker is left"])
    assert [text[: -len(" 1")] for text in out] == [f"[{rank}] saved after {number.name}" for rank in range(2)]
    if number == signal.SIGUSR1:
        assert [text[-1] for text in out] == ["1", "1"], "each worker got it once"


def test_a_signal_that_the_workers_only_note_changes_nothing(job: Any) -> None:
    script = (
        "import os, signal, time\ngot = []\nsignal.signal(signal.SIGUSR2, lambda *_: got.append(1))\n"
        "print('up', os.getpid(), flush=True)\nwhile not got: time.sleep(0.02)\ntime.sleep(0.5)\nprint('got', len(got))"
    )
    process, _ = start(job, script, "--no-preload")
    process.send_signal(signal.SIGUSR2)
    assert finish(process) == (0, ["[0] got 1", "[1] got 1"], [])


def test_a_worker_that_does_not_follow_is_ended_after_the_grace(job: Any) -> None:
    script = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', os.getpid(), flush=True)\n"
        "if os.environ['RANK'] == '0': time.sleep(0.2); sys.exit(143)\ntime.sleep(60)"
    )
    started = time.monotonic()
    process, _ = start(job, script, "--no-preload", "--grace", "1")
    code, _, err = finish(process)
    assert (code, time.monotonic() - started < 15) == (143, True)
    line = "allhands: the workers stopped after SIGTERM; rank 1 had not ended in time and got SIGKILL; no worker is left"
    assert err == [line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_that_a_signal_kills_has_failed(job: Any, number: signal.Signals) -> None:
    script = "import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(60)"
    process, pids = start(job, script, "--no-preload")
    os.kill(pids[1], number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err[0] == f"allhands: rank 1 ({os.uname().nodename}, pid {pids[1]}) failed first: killed by {number.name}"


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


# Functions


def saves(handled: bool) -> str:
    """Leave after SIGTERM or SIGUSR1, half a second later; tell when SIGUSR2 comes."""
    got: list[int] = []
    if handled:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: got.append(number))
    worker.send({"up": int(os.environ["RANK"])})
    deadline = time.monotonic() + 20
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    if got != [signal.SIGUSR2]:
        sys.exit(128 + got[0])
    return "noted"


def spawn_and_signal(number: int, handled: bool = True) -> list[Any]:
    """The caller gets a signal, from outside, when both workers are up."""
    up: list[int] = []

    def hear(rank: int, message: Any) -> None:
        up.append(rank)
        if len(up) == 2:
            os.kill(os.getpid(), number)

    return spawn(saves, (handled,), workers=2, on_message=hear)


@pytest.fixture
def _defaults() -> Any:
    """The handlers of a process that handles no signal, checked to be back in the end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    now = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert now == dict.fromkeys(numbers, signal.SIG_DFL)


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_caller_leaves_when_its_workers_did(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as raised:
        spawn_and_signal(number)
    assert raised.value.code == 128 + number


@pytest.mark.usefixtures("_defaults")
def test_the_caller_goes_on_when_its_workers_do() -> None:
    assert spawn_and_signal(signal.SIGUSR2) == ["noted", "noted"]


@pytest.mark.usefixtures("_defaults")
def test_workers_that_do_not_handle_a_signal_die_of_it() -> None:
    with pytest.raises(WorkerError, match="failed first: killed by SIGTERM") as raised:
        spawn_and_signal(signal.SIGTERM, handled=False)
    assert raised.value.exit_code == 143


def test_a_handler_of_the_callers_own_is_left_in_place() -> None:
    got: list[int] = []

    def own(number: int, _frame: Any) -> None:
        got.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        results = spawn(
            lambda: [worker.send({}), time.sleep(0.6)] and "untouched",
            workers=1,
            on_message=lambda *_: os.kill(os.getpid(), signal.SIGUSR1),
        )
        assert (results, got, signal.getsignal(signal.SIGUSR1)) == (["untouched"], [signal.SIGUSR1], own)
    finally:
        signal.signal(signal.SIGUSR1, before)
