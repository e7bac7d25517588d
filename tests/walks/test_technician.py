"""How a hospital's technician joins a federated training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import allhands
from allhands import wire
from tests.walks.walking import in_order, walk

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.serial
@pytest.mark.slow
def test_technician(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    text = walk("technician", tmp_path, PORT=str(wire.free_port()))
    in_order(
        text,
        "2 of 2 clients a round, 2 rounds; 60 samples",
        "written to logs/simulated: metrics.csv, report.html",
        "Dry run of north: nothing was sent, and no server was asked.",
        "Leaves this site after each round, of 4 steps:",
        "the page says: True",
        "without its token: 403",
        "the run's page, for whoever has this address: http://127.0.0.1:",
        "round 2: 2 sites in",
        "the run has ended: finished",
        "clients 0.6",
        "no setting differs",
    )
    # What was simulated is what the sites have trained.
    one, other = (
        allhands.load_checkpoint(tmp_path / folder / "checkpoints" / "last")["model"]
        for folder in ("logs/simulated", "logs")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Nothing is left of what was started.
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in _command(pid)]


def _command(pid: Path) -> str:
    try:
        return (pid / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
