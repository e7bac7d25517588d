"""Runs the example scripts of a folder with COALA's source, with only their import lines changed.

Rounds are cut to one with one pass, data sets are noise of the right shape, and other libraries
that are not installed (wandb, torchvision, omegaconf) are objects that accept everything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Names of COALA's packages come from one module here.
_IMPORT = re.compile(r"^(\s*)from coala(?:\.[\w.]+)? import", re.MULTILINE)
_WHOLE = re.compile(r"^(\s*)import coala$", re.MULTILINE)
# The arguments of scripts that would start more processes than this machine may have cores.
_ARGUMENTS = {"distributed_mp.py": ["--gpus", "2", "--rounds", "1", "--local_epoch", "1"]}
_SLURM_TASKS = {"distributed_slurm.py": 4}
SHORTER = """
import importlib.util, sys
from unittest.mock import MagicMock
for name in ("wandb", "torchvision", "omegaconf"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = MagicMock()
import torch
from torch.utils.data import TensorDataset
from allhands.data import catalogue
from allhands.federated.coala import api
SIZES = {"mnist": (1, 28), "cifar10": (3, 32)}
def load(name, split, root=None):
    channels, pixels = SIZES[name]
    number = 400 if split == "train" else 20
    return TensorDataset(torch.randn(number, channels, pixels, pixels), torch.arange(number) % 10)
catalogue.load = load
check = api.check
def shorter(conf):
    conf = {key: dict(value) if isinstance(value, dict) else value for key, value in conf.items()}
    conf.setdefault("server", {})["rounds"] = 1
    conf.setdefault("client", {})["local_epoch"] = 1
    conf["client"].pop("rounds", None)
    return check(conf)
api.check = lambda conf: shorter(conf or {})
"""


def changed(text: str) -> str:
    """A script with its import lines changed."""
    text = _WHOLE.sub(r"\1import allhands.federated as coala", text)
    return _IMPORT.sub(r"\1from allhands.federated import", text)


def outcomes(checkout: Path) -> dict[str, tuple[str, str]]:
    """The state of each example script, and the last line of its error."""
    scripts = sorted((checkout / "examples").glob("*.py"))
    return {script.name: _outcome(script) for script in scripts}


def _outcome(script: Path) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "sitecustomize.py").write_text(SHORTER)
        (folder / script.name).write_text(changed(script.read_text()))
        _write_speakers(folder)
        tasks = [
            subprocess.Popen(
                [sys.executable, script.name, *_ARGUMENTS.get(script.name, [])],
                cwd=folder,
                env=os.environ
                | {"PYTHONPATH": f"{folder}:{ROOT}", "ALLHANDS_DATA": given}
                | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for variables in _tasks(script.name)
        ]
        said = [task.communicate()[0] for task in tasks]
    lines = [line for text in said for line in text.splitlines()]
    told = [line for line in lines if line.startswith("allhands.errors.")]
    if told:
        return "refused", told[0].partition(": ")[2].partition("; write ")[2] or told[0].partition(
            ": "
        )[2]
    failed = any(task.returncode for task in tasks)
    if failed or any(line.startswith("Traceback") for line in lines):
        return "absent", lines[-1] if lines else "no word"
    return "works", ""


def _tasks(name: str) -> list[dict[str, str]]:
    """The variables of each process: srun's, of a script that asks Slurm."""
    tasks = _SLURM_TASKS.get(name)
    if tasks is None:
        return [{}]
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_NODEID": "0",
    }
    return [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(tasks)]


def _write_speakers(folder: Path) -> None:
    import numpy as np

    drawn = np.random.default_rng(0)
    np.savez(
        folder / "shakespeare_speakers.npz",
        tokens=drawn.integers(0, 65, 20000, dtype=np.uint8),
        start=np.arange(0, 20001, 200),
        names=np.array([f"speaker {number}" for number in range(100)]),
    )
