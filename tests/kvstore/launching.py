"""A job of two workers and two servers, one of which is killed, and what it comes to by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def launch_with_servers(folder: Path, text: str, *args: str) -> tuple[list[str], str]:
    """Run a script that prints "sum" and its weights; a server may be started again once.

    Returns:
        The ends of the lines with "sum", and the whole output.
    """
    script = folder / "script.py"
    script.write_text(text)
    start = "from allhands.cli.main import main; main()"
    options = ("-n", "2", "-s", "2", "--server-restarts", "1")
    done = subprocess.run(
        [sys.executable, "-c", start, "launch", *options, str(script), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("] ", 1)[1] for line in done.stdout.splitlines() if "sum" in line]
    return lines, done.stdout


def ending_by_hand() -> str:
    """What each worker prints when no step of the nine is lost."""
    weights = [torch.ones(50_000), torch.zeros(7)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for step in range(9):
        for weight in weights:
            # the mean of the two workers' gradients
            weight.grad = torch.full_like(weight, 1.5 + step)
        optimizer.step()
    return " ".join(["sum", *(float(weight.double().sum()).hex() for weight in weights)])
