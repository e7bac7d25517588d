"""COALA's tutorial under a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("forked_python")

ROOT = Path(__file__).parents[2]
# Every task finds these registered, so that the script, which names no data, need not read MNIST.
REGISTERS = """
import torch
import allhands.federated as coala


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(16, 3))


drawn = torch.Generator().manual_seed(1)
x = torch.randn(300, 1, 4, 4, generator=drawn)
coala.register_dataset((x, x.flatten(1)[:, :3].argmax(1)), (x, x.flatten(1)[:, :3].argmax(1)))
coala.register_model(Net)
"""


def test_the_script_trains_on_both_nodes_and_every_task_ends(slurm: Any) -> None:
    folder = Path(slurm.folder) / "federated"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REGISTERS)
    script = ROOT / "examples" / "federated_tutorial" / "with_slurm.py"

    def start(options: str) -> list[str]:
        done = subprocess.run(
            ["srun", *options.split(), f"--chdir={folder}", sys.executable, str(script)],
            capture_output=True,
            text=True,
            env=slurm.environ() | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return re.sub(r"\d+\.\d\d s", "N s", done.stdout).splitlines()

    several, one = start("-N2 -n3"), start("-N1 -n1")
    assert several[0] == "100 clients, 5 a round, 10 rounds, 3 processes on cpu"
    assert one[0] == "100 clients, 5 a round, 10 rounds, 1 process on cpu"
    assert len(several) == 11
    assert several[1:] == one[1:]
