"""The wide model, in small: one process has too little memory, and four have enough."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, program, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


@pytest.mark.rare
def test_four_workers_train_what_one_cannot_hold(tmp_path: Path) -> None:
    script = (
        str(EXAMPLES / "wide_model" / "wide.py"),
        "--width",
        "1536",
        "--limit",
        "380",
        "--steps",
        "2",
    )
    alone = subprocess.run(
        [program("allhands"), "launch", "-n", "1", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert alone.returncode != 0
    assert "rank 0 has no memory left" in alone.stdout + alone.stderr
    together = run_in(tmp_path, program("allhands"), "launch", "-n", "4", *script)
    took = [
        int(line.split(" took ")[1].split()[0])
        for line in together.splitlines()
        if " took " in line
    ]
    assert len(took) == 4
    assert max(took) < 380
