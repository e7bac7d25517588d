"""Random deaths, hangs and leaves in elastic trainings; `make soak-membership`: more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak_membership.py"


@pytest.mark.parametrize(
    "words",
    [
        "--events 20 --workers 3",
        # The tests of test_elastic_meshes.py lose workers of two copies, too, at chosen moments.
        pytest.param("--events 5 --shards 2", marks=pytest.mark.rare),
        # And those of test_elastic_kvstore.py workers of a store.
        pytest.param(
            "--events 5 --workers 3 --strategy KVStore(update='store')", marks=pytest.mark.rare
        ),
    ],
)
def test_they_change_nothing(mark: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words.split(), "--gap", "0.5", "--seconds", "120"],
        cwd=SCRIPT.parent,
        env=os.environ,
        timeout=patience(390),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"wrong": []' in done.stdout
