"""`allhands evaluate` and `allhands predict`."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from allhands.cli.prediction_files import Predictions, write
from allhands.cli.run_folder import read_folder
from allhands.errors import UserError
from tests.cli import projects
from tests.cli.projects import json_of, said


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    projects.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said(capsys, "run", "-C", "run.yml")
    return tmp_path / "logs" / "first"


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_what_is_measured_is_what_the_training_has_measured(trained, capsys):
    folder = read_folder(trained)
    for given, row in (("logs/first", folder.best()), ("logs/first/last", 2)):
        for more in ([], ["--workers", "2"]):
            found = json_of(capsys, "evaluate", given, "--json", *more)["measured"]
            assert found.keys() == {"valid"}
            for name, value in found["valid"].items():
                assert value == pytest.approx(folder.rows[f"valid_{name}"][row], rel=1e-5)
    f1 = "metrics=[{name: MulticlassF1Score, num_classes: 3, label: f1}]"
    other = ("data.options.samples=80", f1, "--loader", "train")
    found = json_of(capsys, "evaluate", "logs/first", "--json", *other)
    assert found["measured"]["train"].keys() == {"loss", "f1"}
    text = said(capsys, "evaluate", "logs/first")
    assert text.startswith(str(trained / "checkpoints" / "epoch-000"))
    assert "  valid: loss " in text


def test_predictions_have_one_row_a_sample_in_every_format(trained, capsys, tmp_path):
    measured = json_of(capsys, "evaluate", "logs/first", "--json")["measured"]["valid"]
    assert "10 rows (sample, target, predicted, output)" in said(
        capsys, "predict", "logs/first", "-o", "p.csv"
    )
    with Path("p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["sample", "target", "predicted", "output_0", "output_1", "output_2"]
    assert [int(row["sample"]) for row in rows] == list(range(10))
    right = [row["target"] == row["predicted"] for row in rows]
    assert sum(right) / 10 == pytest.approx(measured["accuracy"])
    said(capsys, "predict", "logs/first", "-o", "p.npz", "--loader", "train")
    arrays = np.load("p.npz")
    assert arrays["output"].shape == (40, 3)
    assert np.allclose(arrays["output"][:10, 1], [float(row["output_1"]) for row in rows])
    parquet = pytest.importorskip("pyarrow.parquet")
    said(capsys, "predict", "logs/first", "-o", "p.parquet", "--workers", "1")
    assert parquet.read_table("p.parquet").to_pydict()["predicted"] == [
        int(row["predicted"]) for row in rows
    ]


def test_outputs_of_any_structure_become_columns(tmp_path):
    output = {"boxes": torch.zeros(2, 1, 2), "scores": (torch.ones(2), torch.ones(2, 2))}
    made = Predictions.of(output, None, of_classes=True)
    assert list(made.columns()) == [
        "sample", "boxes_0_0", "boxes_0_1", "scores_0", "scores_1_0", "scores_1_1",
    ]  # fmt: skip
    wide = Predictions.of(torch.zeros(2, 200, 60), None, of_classes=False)
    with pytest.raises(UserError, match="12,000 numbers a sample .*write -o predictions.npz"):
        write(tmp_path / "p.csv", wide)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "p.npz", wide)
    with pytest.raises(UserError, match="'output_0_a' is a str; a file takes tensors"):
        Predictions.of([{"a": "text"}], None, False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["evaluate", "logs"], "logs is no folder of a run: it has no metrics.csv; there are logs"),
        (["evaluate", "nowhere"], "nowhere is no folder of a run: there is no such folder"),
        (
            ["evaluate", "logs/first", "--loader", "vald"],
            "no loader 'vald'; .*did you mean 'valid'",
        ),
        (["evaluate", "logs/first/lst"], "lst"),
        (["evaluate", "logs/first", "model.hidden=[3]"], "does not fit the model of the run file"),
        (["evaluate", "logs/first", "data.name=gone.py:load"], "there is no file"),
        (["predict", "logs/first", "-o", "p.txt"], "its ending says the format; write p.csv"),
        (["predict", "logs/first", "-o", "run.csv"], "run.csv exists already; .*--force"),
        (["predict", "logs/first", "-o", "no/p.csv"], "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_said(trained, capsys, words, text):
    Path("run.csv").write_text("mine")
    assert re.search(text, said(capsys, *words, code=2))


def test_a_script_s_folder_has_no_model_to_load(trained, capsys):
    (trained / "run.yml").unlink()
    assert "has no run.yml: a script has trained it" in said(
        capsys, "evaluate", "logs/first", code=2
    )
