"""Whatever happens to a worker or to the launcher: the truth is told, the exit code is right, no
process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest

from tests.patience import patience

from .conftest import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# Rank 1 of a gloo group fails in some way while the others wait for it in a collective.
FAIL = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("rank", rank, "is up")
dist.barrier()
if rank == 1:
    {how}
dist.all_reduce(torch.ones(3))
dist.barrier()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "cause", "code"),
    [
        ("raise ValueError('boom')", "raised ValueError: boom", 1),
        pytest.param("sys.exit(3)", "exit code 3", 3, marks=pytest.mark.rare),
        pytest.param("os._exit(4)", "exit code 4", 4, marks=pytest.mark.rare),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL (out of memory? see `dmesg`)",
            137,
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "killed by SIGSEGV",
            139,
            marks=pytest.mark.rare,
        ),
        pytest.param("sys.exit('no way')", "exit code 1", 1, marks=pytest.mark.rare),
    ],
)
def test_the_first_failure_is_named_last(job: Any, how: str, cause: str, code: int) -> None:
    started = time.monotonic()
    got, out, err = job.run("-n", "3", job.script(FAIL.format(how=how)))
    assert got == code, err
    assert time.monotonic() - started < patience(20)
    assert sorted(line for line in out.splitlines() if "is up" in line) == [
        f"[{r}] rank {r} is up" for r in range(3)
    ]
    report = err[err.index("allhands: ") :].splitlines()
    assert report[0].startswith(f"allhands: rank 1 ({os.uname().nodename}, pid ")
    assert report[0].endswith(f") failed first: {cause}")
    assert all(line.startswith("  ") for line in report[1:]), (
        "the report is the last thing on the screen"
    )
    assert "    | rank 1 is up" in report


def test_a_rank_that_left_early_with_0_is_suspected(job: Any) -> None:
    code, _, err = job.run("-n", "2", job.script(FAIL.format(how="sys.exit(0)")))
    assert code == 1
    assert "allhands: rank 0 " in err
    assert "rank 1 had already left with exit code 0, 0." in err


@pytest.mark.parametrize("how", ["time.sleep(1); sys.exit(0)", "os._exit(0)"])
def test_leaving_early_with_0_is_no_failure_of_a_script(job: Any, how: str) -> None:
    script = job.script(
        f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(0.5)\nprint('done')"
    )
    code, out, err = job.run("-n", "2", "--no-preload", script)
    assert (code, out, err) == (0, "[0] done\n", "")


def test_a_stopped_worker_is_noticed_within_seconds(job: Any) -> None:
    started = time.monotonic()
    code, _, err = job.run(
        "-n", "2", job.script(FAIL.format(how="os.kill(os.getpid(), signal.SIGSTOP)"))
    )
    assert code == 137
    assert time.monotonic() - started < patience(20)
    assert re.search(r"\) failed first: no progress for \d+ s: it is stopped \(state T\)", err)
    assert "allhands: rank 1 " in err
    assert "stopped because of it: rank 0" in err


def test_a_worker_without_heartbeat_is_noticed(job: Any) -> None:
    # A regular expression that backtracks for ever holds the interpreter lock.
    hang = "import re; re.match(r'(a|a)*b', 'a' * 60)"
    code, _, err = job.run(
        "-n", "2", "--heartbeat-timeout", "4", "--grace", "1", job.script(FAIL.format(how=hang))
    )
    assert code == 137
    assert "allhands: rank 1 " in err
    assert re.search(
        r"failed first: no heartbeat for [4-9] s: it computes \(state R\) without ever releasing",
        err,
    )


def test_a_long_wait_is_no_silence(job: Any) -> None:
    script = job.script("import time\ntime.sleep(5)\nprint('ok')")
    assert job.run("-n", "1", "--no-preload", "--heartbeat-timeout", "3", script)[:2] == (
        0,
        "[0] ok\n",
    )


def test_a_teardown_that_hangs_is_ended(job: Any) -> None:
    script = job.script(
        "import atexit, time, os\natexit.register(time.sleep, 60)\n"
        "if os.environ['RANK'] == '0': raise KeyError('x')\ntime.sleep(60)"
    )
    started = time.monotonic()
    code, _, err = job.run("-n", "2", "--no-preload", "--grace", "1", script)
    assert code == 1
    assert time.monotonic() - started < patience(10)
    assert "failed first: raised KeyError: 'x'" in err


def test_what_a_worker_leaves_behind_is_ended(job: Any) -> None:
    script = job.script(
        "import subprocess\n"
        "subprocess.Popen(['sleep', '300'])\n"
        "subprocess.Popen(['sleep', '301'], start_new_session=True)\n"
        "subprocess.Popen(['sh', '-c', 'setsid sleep 302 & '])\n"
        "print('started')\n"
    )
    code, out, err = job.run("-n", "2", "--no-preload", script)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] started", "[1] started"]
    assert job.alive() == []


# Workers that ignore every polite signal, with children of their own: processes and workers of a
# DataLoader.
STUBBORN = """
import signal, subprocess, sys, time, torch
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 300; sleep 300"])
loader = iter(torch.utils.data.DataLoader(torch.arange(1000), num_workers=1, prefetch_factor=2))
next(loader)
print("up", flush=True)
while True:
    time.sleep(1)
"""


def start_stubborn(job: Any, *options: str) -> subprocess.Popen[bytes]:
    process = job.start("-n", "2", *options, job.script(STUBBORN))
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] up\n", b"[1] up\n"]
    # launcher, agent, store, and for each of two workers: itself, two children (one with a child),
    # a loader's worker
    assert len(job.alive()) >= 12
    return process


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.rare),
        pytest.param(signal.SIGHUP, marks=pytest.mark.rare),
    ],
)
def test_launcher_gets_a_signal(job: Any, number: signal.Signals) -> None:
    process = start_stubborn(job, "--grace", "1")
    process.send_signal(number)
    _, err = process.communicate(timeout=patience(20))
    assert process.returncode == 128 + number
    assert job.alive() == [], "nothing is left when the launcher ends"
    line = (
        f"allhands: stopped by {number.name}; ranks 0, 1 had not ended in time and got SIGKILL; "
        "no worker is left"
    )
    assert err.decode().splitlines()[-1] == line


def test_second_ctrl_c_kills_at_once(job: Any) -> None:
    process = start_stubborn(job, "--grace", "60")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=patience(10))
    assert process.returncode == 130
    assert job.alive() == []


def test_launcher_is_killed(job: Any) -> None:
    process = start_stubborn(job)
    process.kill()
    process.wait()
    deadline = time.monotonic() + patience(5)
    while job.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.alive() == []
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()


@pytest.mark.usefixtures("new_python")
def test_agent_is_killed(job: Any) -> None:
    process = start_stubborn(job)
    agent = [
        int(pid)
        for pid in subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(process.pid)]).split()
    ]
    os.kill(agent[0], signal.SIGKILL)
    _, err = process.communicate(timeout=patience(20))
    assert process.returncode == 137
    assert b"failed first: its agent process ended" in err


def test_workers_that_ignore_sigterm_do_not_outlive_a_failure(job: Any) -> None:
    script = job.script(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '2': time.sleep(0.5); raise OSError('disk')\ntime.sleep(60)"
    )
    code, _, err = job.run("-n", "3", "--no-preload", "--grace", "1", script)
    assert code == 1
    assert err.splitlines()[-1] == (
        "  stopped because of it: ranks 0, 1; ranks 0, 1 did not end within 1 s of SIGTERM and got "
        "SIGKILL"
    )


def test_workers_may_end_in_order_after_sigterm(job: Any) -> None:
    script = job.script(
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5)\n    print('saved')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up')\nwhile True: time.sleep(0.1)"
    )
    process = job.start("-n", "2", "--no-preload", script)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] up\n", b"[1] up\n"]
    process.terminate()
    out, _ = process.communicate(timeout=patience(20))
    assert sorted(out.splitlines()) == [b"[0] saved", b"[1] saved"]
    assert process.returncode == 143


def test_reader_of_the_output_leaves(job: Any) -> None:
    script = job.script("import time\nwhile True: print('line'); time.sleep(0.01)")
    process = job.start("-n", "2", "--no-preload", script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=patience(20)) == 141
    assert job.alive() == []
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.rare
def test_ten_jobs_at_once_do_not_collide(job: Any) -> None:
    script = job.script(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = "
        "torch.ones(1)\n"
        "dist.all_reduce(x)\nprint(int(x))\ndist.destroy_process_group()"
    )
    jobs = [job.start("-n", "2", script) for _ in range(10)]
    for process in jobs:
        out, err = process.communicate(timeout=patience(150))
        assert (process.returncode, sorted(out.splitlines())) == (0, [b"[0] 2", b"[1] 2"]), err


@pytest.mark.usefixtures("new_python")
def test_ctrl_c_while_torch_is_imported(job: Any) -> None:
    process = job.start("-n", "2", job.script("print('up')"))
    assert wait_until(lambda: len(job.alive()) > 1, 20), (
        "the process that imports torch has not been started"
    )
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=patience(10))
    assert (process.returncode, out) == (130, b"")
    assert err == b"allhands: stopped by SIGINT; no worker is left\n"


def test_a_failure_before_ctrl_c_is_still_told(job: Any) -> None:
    script = job.script(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1': print('bye', flush=True); sys.exit(6)\ntime.sleep(60)"
    )
    process = job.start("-n", "2", "--no-preload", "--grace", "30", script)
    assert process.stdout is not None
    while b"bye" not in process.stdout.readline():
        pass
    time.sleep(2)  # until it has ended
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=patience(20))
    assert process.returncode == 6
    assert b"failed first: exit code 6" in err


def test_a_job_that_was_suspended_goes_on(job: Any) -> None:
    # As `scontrol suspend` does it: every process is stopped, and none is to blame for its silence.
    script = job.script("import time\nprint('up', flush=True)\ntime.sleep(4)\nprint('done')")
    process = job.start("-n", "2", "--no-preload", "--heartbeat-timeout", "3", script)
    assert process.stdout is not None
    assert [process.stdout.readline()[3:] for _ in range(2)] == [b" up\n"] * 2
    pids = job.alive()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(8 if number == signal.SIGSTOP else 0)
    out, err = process.communicate(timeout=patience(20))
    assert (process.returncode, sorted(out.splitlines()), err) == (
        0,
        [b"[0] done", b"[1] done"],
        b"",
    )


def test_a_reader_that_pauses_is_no_failure_of_the_workers(job: Any) -> None:
    script = job.script("for i in range(20000): print(f'{i:0100}')")
    process = job.start("-n", "2", "--no-preload", "--heartbeat-timeout", "3", script)
    time.sleep(8)
    out, err = process.communicate(timeout=patience(30))
    assert (process.returncode, err) == (0, b"")
    for rank in (b"[0] ", b"[1] "):
        assert [int(line[4:]) for line in out.splitlines() if line.startswith(rank)] == list(
            range(20000)
        )
