"""What ends a world under srun when one rank fails: real processes over real sockets, without torch
and without Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.world.failure_detector import heartbeat_timeout
from tests.patience import patience

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

RANK = """
import atexit, os, signal, sys, time
from pathlib import Path
from allhands.world import failure_detector

folder, how = Path(sys.argv[1]), sys.argv[4]
rank, size, who = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])


class Store:
    def set(self, key, value):
        (folder / f".{key}").write_text(value)
        (folder / f".{key}").rename(folder / key)

    def wait(self, keys, timeout=None):
        while not all((folder / key).exists() for key in keys):
            time.sleep(0.01)

    def get(self, key):
        return (folder / key).read_bytes()


mine = failure_detector.start(Store(), rank, size, "127.0.0.1", 3.0)
atexit.register(lambda: None if getattr(sys, "last_type", None) else mine.close())
(folder / f"here{rank}").touch()
while not all((folder / f"here{other}").exists() for other in range(size)):
    time.sleep(0.01)
if os.fork() == 0:  # as a loader process would
    time.sleep(4)
    os._exit(0)
time.sleep(0.3)
if rank == who:
    if how == "raise":
        raise ValueError("planted fault")
    if how == "exit":
        sys.exit(3)
    if how == "bare exit":
        raise SystemExit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "leave":
        sys.exit(0)
    if how == "asked to leave":
        sys.exit(143)
if how == "bare exit" and rank == 2:
    time.sleep(0.5)
    raise ConnectionError("connection closed by peer")
time.sleep(2.5 if "leave" in how else 40)
"""


def run(folder: Path, how: str, who: int, size: int = 3) -> tuple[list[int], str, float]:
    """Exit codes by rank, all that was printed, and seconds until the last rank that is not stopped
    has ended."""
    folder.mkdir()
    (folder / "rank.py").write_text(RANK)
    started = time.monotonic()
    with (folder / "said").open("ab") as said:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-Wignore::DeprecationWarning",  # from Python 3.12 on, of a fork beside threads
                    str(folder / "rank.py"),
                    str(folder),
                    str(rank),
                    str(size),
                    how,
                    str(who),
                ],
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | {"SLURM_LOCALID": "0"},
            )
            for rank in range(size)
        ]
    try:
        for rank, process in enumerate(ranks):
            if not (how == "stop" and rank == who):
                process.wait(30)
    finally:
        seconds = time.monotonic() - started
        for process in ranks:
            process.kill()
            process.wait()
    return [process.returncode for process in ranks], (folder / "said").read_text(), seconds


CASES = {
    "raise, another rank": (
        "raise",
        1,
        [1, 1, 1],
        r"rank 1 \(\S+, pid \d+\) failed first: raised ValueError: planted fault",
    ),
    "raise, rank 0": (
        "raise",
        0,
        [1, 1, 1],
        r"rank 0 \(\S+, pid \d+\) failed first: raised ValueError: planted fault",
    ),
    "exit": ("exit", 2, [1, 1, 3], r"rank 2 \(\S+, pid \d+\) failed first: left with exit code 3"),
    "exit, rank 0": (
        "exit",
        0,
        [3, 1, 1],
        r"rank 0 \(\S+, pid \d+\) failed first: left with exit code 3",
    ),
    "bare exit": (
        "bare exit",
        1,
        [1, 3, 1],
        r"rank 2 \(\S+, pid \d+\) failed first: raised ConnectionError.*\n"
        r".*rank 1 \(\S+, pid \d+\) had already left, [0-3]\.\d s",
    ),
    "kill": (
        "kill",
        1,
        [1, -9, 1],
        r"rank 1 \(\S+, pid \d+\) failed first: is gone without a word: killed",
    ),
    "kill, rank 0": (
        "kill",
        0,
        [-9, 1, 1],
        r"rank 1 \(\S+, pid \d+\) ends because rank 0 is gone without a word: killed",
    ),
    "stop": (
        "stop",
        2,
        [1, 1, -9],
        r"rank 2 \(\S+, pid \d+\) failed first: has given no sign of life for [345] s",
    ),
    "stop, rank 0": (
        "stop",
        0,
        [-9, 1, 1],
        r"rank 1 \(\S+, pid \d+\) ends because rank 0 has given no sign of life for [345] s",
    ),
}


def test_the_first_failure_is_named_and_ends_all_within_seconds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        found = list(pool.map(lambda case: run(tmp_path / case[0], *case[1][:2]), CASES.items()))
    for (name, (_, _, codes, message)), (ended, said, seconds) in zip(
        CASES.items(), found, strict=True
    ):
        assert ended == codes, (name, said)
        assert re.search(message, said), (name, said)
        assert seconds < patience(20), name


def test_who_leaves_in_order_is_not_missed(tmp_path: Path) -> None:
    cases = [("leave", 0), ("leave", 2), ("asked to leave", 1)]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: run(tmp_path / f"{case[0]} {case[1]}", *case), cases))
    for (how, who), (ended, said, _) in zip(cases, found, strict=True):
        assert ended == [
            143 if how == "asked to leave" and rank == who else 0 for rank in range(3)
        ], said
        assert said == ""


def test_the_timeout_is_a_number_of_seconds_or_0() -> None:
    assert heartbeat_timeout({}) == 60.0
    assert heartbeat_timeout({"ALLHANDS_HEARTBEAT_TIMEOUT": "0"}) == 0.0
    assert heartbeat_timeout({"ALLHANDS_HEARTBEAT_TIMEOUT": "7.5"}) == 7.5
    for wrong in ("1", "-5", "soon", "inf"):
        with pytest.raises(UserError, match="ALLHANDS_HEARTBEAT_TIMEOUT='"):
            heartbeat_timeout({"ALLHANDS_HEARTBEAT_TIMEOUT": wrong})
