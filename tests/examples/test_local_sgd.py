"""Local SGD over a server: a worker that is killed leaves the mean, and comes back with the
server's weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, program

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def test_a_worker_is_lost_and_comes_back(tmp_path: Path) -> None:
    command = [
        program("allhands"),
        "launch",
        "-n",
        "3",
        "-s",
        "1",
        "--on-worker-failure",
        "restart",
        "--max-restarts",
        "1",
    ]
    command += [
        str(EXAMPLES / "local_sgd" / "over_servers.py"),
        "--rounds",
        "100000",
        "--every",
        "8",
        "--pause",
        "0.05",
    ]
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        lines = job.stdout
        assert lines is not None

        def until(pattern: str) -> re.Match[str]:
            for line in lines:
                said.append(line)
                found = re.match(pattern, line)
                if found:
                    return found
            raise AssertionError("".join(said))

        try:
            worker = int(until(r"\[1\] worker 1 of 3, process (\d+)")[1])
            until(r"\[1\] round 3: 3 workers")
            os.kill(worker, signal.SIGKILL)
            alone = int(until(r"\[0\] round (\d+): 2 workers")[1])
            assert int(until(r"\[1\] worker 1 of 3, process (\d+)")[1]) != worker
            back = until(r"\[1\] round (\d+): 3 workers, accuracy (\S+)%")
            last = str(int(back[1]) + 5)
            ends = [until(rf"\[(\d)\] round {last}: 3 workers, accuracy (\S+)%") for _ in range(3)]
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate()
    assert int(back[1]) > alone
    assert {found[1] for found in ends} == {"0", "1", "2"}
    assert len({found[2] for found in ends}) == 1, "all have the same weights"
    assert float(ends[0][2]) > 50
