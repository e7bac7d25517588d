"""An engineer's first hour with run files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.walks.walking import in_order, walk

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.mark.serial
@pytest.mark.slow
def test_engineer(tmp_path: Path) -> None:
    text = walk("engineer", tmp_path)
    in_order(
        text,
        "train it:    cd project && allhands run -C run.yml",
        "  3/3 ",
        "written to logs/first: metrics.csv, report.html, run.yml, checkpoints/",
        "there is no subcommand 'evalute'; did you mean 'evaluate'?",
        "exit code 2",
        "valid: loss 0.",
        "rows.csv: 120 rows (sample, target, predicted, output)",
        "accuracy: train 0.",
        "best: logs/sweep/trial-00",
        "optimizer.lr  0.001  0.01",
        "valid_accuracy, last",
    )
    project = tmp_path / "project"
    assert json.loads((project / "run.schema.json").read_text())["properties"]["optimizer"]
    with (project / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    right = sum(row["target"] == row["predicted"] for row in rows) / len(rows)
    assert right > 0.85
    with (project / "logs" / "sweep" / "trials.csv").open(newline="") as file:
        trials = {row["optimizer.lr"]: row for row in csv.DictReader(file)}
    assert len(trials) == 2
