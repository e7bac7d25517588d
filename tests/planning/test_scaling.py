"""Plans over the number of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands import DDP, UserError
from allhands.cli.main import run
from allhands.planning.candidates import Candidate
from tests.planning.test_plan import plan


def test_a_curve_has_the_rows_of_plans_for_each_number(tmp_path: Path) -> None:
    # All fits, so that what is looked at here has no part in the curves.
    ddp = [Candidate(DDP(), {"name": "ddp"})]
    found = plan(2, per_host=2, strategies=ddp)
    scaled = found.over([1, 2, 8])
    assert {"single", "ddp", "fsdp", "tensor", "fsdp x ddp", "tensor x ddp"} <= set(scaled.curves)
    assert [gpus for gpus, _ in scaled.curves["single"]] == [1]
    assert [gpus for gpus, _ in scaled.curves["ddp"]] == [2, 8]
    rows = {row.name: row for row in plan(8, per_host=2).rows}
    for name in ("ddp", "fsdp"):
        assert scaled.curves[name][-1][1].to_dict() == rows[name].to_dict()
    (only,) = scaled.curves["tensor x ddp"]
    assert only[1].to_dict() == rows["mesh dp 4 tp 2"].to_dict()
    figure = scaled.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "ms of a step",
        "samples a second",
        "GB of the fullest h100",
    ]
    with pytest.raises(UserError, match="gpus"):
        found.over([0])


def test_what_does_not_fit_has_no_point() -> None:
    peaks = {row.name: row.peak for row in plan(2).rows}
    scaled = plan(2, memory=(peaks["tensor"] + peaks["fsdp"]) / 2).over([2])
    assert "tensor" in scaled.curves
    rows = [row for curve in scaled.curves.values() for _, row in curve]
    assert all(row.fits for row in rows)


def test_the_command_writes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("allhands.planning.plan.TrainingPlan.plot.__defaults__", (None, (1, 2)))
    path = tmp_path / "plan.png"
    assert run(["plan", "--gpus", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert run(["plan", "--gpus", "1", "--plot", str(tmp_path / "plan.txt")]) == 2
    assert "cannot be written" in capsys.readouterr().err
