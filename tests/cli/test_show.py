"""`allhands show` and `allhands compare`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allhands.config import read_run
from tests.cli.projects import json_of, said

ROWS = """epoch,step,lr,seconds,train_loss,train_accuracy,valid_loss,valid_accuracy
1,45,0.1,2.5,1.5,0.5,1.25,0.6
2,90,0.05,2.25,0.75,0.7,0.5,0.9
3,135,0.025,2.25,0.00005,0.9,0.625,0.8
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, lr in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(ROWS.replace("0.9\n", f"{1 - lr}\n"))
        text = read_run((), [f"optimizer.lr={lr}", f"logdir={name}"]).to_yaml()
        (tmp_path / name / "run.yml").write_text(text)
    return tmp_path


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(folders, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = said(capsys, "show", "a").splitlines()
    table = lines[: lines.index("")]
    assert max(map(len, lines)) <= width
    assert [line.endswith("*") for line in table if "  2  " in line] == [True]
    left_out = [line for line in table if line.startswith("no room for")]
    assert bool(left_out) == (width <= 80)
    rows = [line for line in table if line.strip()[0].isdigit()]
    assert len({line.index("0.6000") + 6 for line in rows if "0.6000" in line}) == 1
    header = table[0] if width == 120 else table[1]
    end = header.index("accuracy", header.rindex("loss")) + 8
    assert rows[0][end - 6 : end] == "0.6000"  # aligned at the right


def test_curves_of_all_loaders_are_in_one_frame(folders, capsys, monkeypatch):
    text = said(capsys, "show", "a")
    assert "loss: train 5.00e-05, valid 0.6250" in text
    assert any("\u2800" <= character <= "\u28ff" for character in text)
    assert "loss: train" not in said(capsys, "show", "a", "--no-curves")


def test_only_the_last_rows_and_the_best_are_printed(folders, capsys):
    text = said(capsys, "show", "a", "--rows", "1", "--no-curves")
    assert "the last 1 of 3 rows; --rows 0 prints all" in text
    assert [line.split()[0] for line in text.splitlines()[1:4] if line.split()[0].isdigit()] == [
        "2",
        "3",
    ]


def test_the_history_for_programs(folders, capsys):
    found = json_of(capsys, "show", "a", "--json")
    assert found["best"] == 1
    assert found["history"]["valid_loss"] == [1.25, 0.5, 0.625]


def test_two_runs_are_compared_by_settings_and_measurements(folders, capsys):
    text = said(capsys, "compare", "a", "b")
    assert "optimizer.lr  0.1  0.2" in text
    assert "logdir" not in text
    assert re.search(r"valid_accuracy, best row +0.9000 +0.8000 +-0.1\n", text)
    found = json_of(capsys, "compare", "a", "b", "--json")
    assert found["settings"] == {"optimizer.lr": [0.1, 0.2]}
    assert found["measured"]["rows"] == [3, 3]
    (folders / "b" / "run.yml").unlink()
    assert "settings are not known: no run.yml in b" in said(capsys, "compare", "a", "b")


def test_a_damaged_table_is_named(folders, capsys):
    (folders / "a" / "metrics.csv").write_text("epoch,train_loss\n1,x\n")
    assert "a/metrics.csv, line 2: could not convert" in said(capsys, "show", "a", code=2)
