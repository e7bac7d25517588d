"""Twenty random deaths, hangs and leaves in one elastic training; `make soak-membership`: more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timeouts import patience

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak_membership.py"


def test_twenty_events_change_nothing(mark: str) -> None:
    words = ("--events", "20", "--workers", "3", "--gap", "0.5", "--seconds", "120")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=SCRIPT.parent,
        env=os.environ,
        timeout=patience(390),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"wrong": []' in done.stdout
