"""COALA's tutorial as its readers know it; tests/cluster/test_federated.py runs the script for
Slurm."""

from __future__ import annotations

import random
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

import allhands
from allhands.federated.coala import api
from tests.examples.running import EXAMPLES, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]
SCRIPT = EXAMPLES / "federated_tutorial" / "multiprocess.py"
# Every process of the script finds these images registered, so that it need not read and test
# CIFAR-10's 60,000.
REGISTERS = """
import sys
if "resource_tracker" not in " ".join(sys.orig_argv):
    import torch
    import allhands.federated as coala
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 3, 32, 32, generator=drawn), torch.arange(60) % 10
    coala.register_dataset((x[:40], y[:40]), (x[40:], y[40:]))
"""
OPTIONS = ["--num_of_clients", "4", "--local_epoch", "1", "--rounds", "2", "--test_every", "2"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(REGISTERS)
    yield
    api.unregister()
    api._joined = None
    allhands.finalize()


def rounds(said: str) -> list[str]:
    """What the script printed, without times."""
    return re.sub(r"\d+\.\d\d s", "N s", said).partition("\n")[2].splitlines()[1:]


def free_port() -> int:
    """A port that is free, and below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def start(folder: Path, processes: int, cohort: int) -> list[str]:
    port = free_port()
    script = folder / "script.py"
    # The tutorial's is fixed, and tests run side by side.
    script.write_text(SCRIPT.read_text().replace(":8123", f":{port}"))
    said = run_in(
        folder,
        sys.executable,
        str(script),
        "--gpus",
        str(processes),
        "--clients_per_round",
        str(cohort),
        *OPTIONS,
        env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert (
        f"cifar10: 4 clients, {cohort} a round, 2 rounds, {processes} processes on cpu" in said
    ), said
    return rounds(said)


def alone(
    cohort: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    api.unregister()
    exec(REGISTERS, {})
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), "--gpus", "0", "--clients_per_round", str(cohort), *OPTIONS]
    )
    capsys.readouterr()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return rounds(capsys.readouterr().out)


# rare: 3 clients are shared out among 2 processes unevenly, which is the hardest.
@pytest.mark.parametrize(
    "cohort",
    [3, pytest.param(2, marks=pytest.mark.rare), pytest.param(1, marks=pytest.mark.rare)],
)
def test_more_as_many_and_fewer_clients_than_processes(cohort, tmp_path, capsys, monkeypatch):
    together = start(tmp_path, 2, cohort)
    assert len(together) == 3, together
    assert together[2].startswith("cifar10: round 2/2: train loss 2.")
    assert (tmp_path / "saved_models" / "cifar10_global_model_r_2.pth").is_file()
    assert together == alone(cohort, capsys, monkeypatch)
