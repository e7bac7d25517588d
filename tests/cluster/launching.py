"""`allhands launch` from the driver of a cluster, in a folder that all hosts see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm
from tests.patience import patience


def allhands() -> list[str]:
    """The command, before its words."""
    return [sys.executable, "-P", "-c", "from allhands.cli.main import main; main()"]


# A world in the middle of its steps; rank 1 does what it is told at its 20th.
STEPS = """
import os, signal, sys, time
import torch, torch.distributed as dist
import allhands

how = sys.argv[1]
world = allhands.init()
for step in range(100000):
    dist.all_reduce(torch.ones(100000))
    if step == 10 and world.rank == 0:
        print("running", flush=True)
    if step == 20 and world.rank == 1:
        if how == "raise":
            raise ValueError("no such class: 11")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.02)
"""

# What rank 1 of STEPS does, the cause that is told, and the launcher's exit code.
WORKER_FAILURES = [
    ("raise", "raised ValueError: no such class: 11", 1),
    ("exit", "exit code 3", 3),
    ("kill", "killed by SIGKILL", 128 + 9),
    ("stop", "it is stopped (state T), by SIGSTOP or a debugger", 128 + 9),
]


class Launch:
    """One job that runs in the background, and what it says. Use it as a context: it is killed at
    the end.

    Args:
        hosts: the cluster.
        folder: where it is started.
        words: after `allhands launch`.
        extra: variables for the launcher.
        within: the words before `allhands`, such as those of salloc.
    """

    def __init__(
        self,
        hosts: Hosts | Slurm,
        folder: Path,
        *words: str,
        extra: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.out, self.err = (
            folder / f"out-{time.monotonic_ns()}",
            folder / f"err-{time.monotonic_ns()}",
        )
        self.started = time.monotonic()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*within, *allhands(), "launch", *words],
                cwd=folder,
                env=hosts.environ(**(extra or {})),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                # A test run in the background of a shell ignores SIGINT, and so would the launcher.
                preexec_fn=lambda: (  # noqa: PLW1509
                    signal.signal(signal.SIGINT, signal.default_int_handler) and None
                ),
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            # With whatever is between salloc and the launcher.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        """Everything so far, standard output first."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def until(self, text: str, seconds: float = 30.0, times: int = 1) -> None:
        """Wait until it has said something, `times` times."""
        deadline = time.monotonic() + patience(seconds)
        while self.said.count(text) < times:
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode} before it said {text!r}: {self.said}"
            )
            assert time.monotonic() < deadline, (
                f"it did not say {text!r} within {seconds} s: {self.said}"
            )
            time.sleep(0.02)

    def end(self, seconds: float = 40.0) -> tuple[int, str]:
        """Its exit code, and everything that it said."""
        try:
            self.process.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still ran after {seconds} s: {self.said}") from None
        self.lasted = time.monotonic() - self.started
        return self.process.returncode, self.said

    def names_the_failure(self, cause: str, code: int) -> None:
        """Check that STEPS runs, and ends within 30 s of the failure of rank 1, which is on d2,
        with this cause and code."""
        self.until("running")
        began = time.monotonic()
        got, said = self.end()
        assert time.monotonic() - began < patience(30)
        assert got == code, said
        assert "rank 1 (d2, pid " in said
        assert re.search(f"failed first: (no progress for [5-9] s: )?{re.escape(cause)}", said), (
            said
        )

    def told(self) -> list[dict[str, Any]]:
        """The lines of JSON that workers printed, with the `place` that the launcher put before
        each."""
        found = re.findall(r"^\[([^]]+)\] (\{.*\})$", self.out.read_text(), re.MULTILINE)
        return sorted(
            ({**json.loads(text), "place": place} for place, text in found),
            key=lambda one: str(one["place"]),
        )


def shared_folder(hosts: Hosts | Slurm, name: str) -> Path:
    """An empty folder that is the same on the driver and on all hosts."""
    folder = hosts.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "hosts").write_text("# all of them\nd1\nd2\n")
    return folder
