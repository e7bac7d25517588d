"""A data scientist's first hour in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.walks.walking import WALKS, environment

pytestmark = pytest.mark.usefixtures("forked_python")


def cells() -> list[str]:
    """The cells of the walk, without what stands before the first."""
    text = (WALKS / "data_scientist.py").read_text(encoding="utf-8")
    return [f"#{part}" for part in text.split("\n# %%")[1:]]


def shown(outputs: list[Any], kind: str) -> list[Any]:
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.serial
@pytest.mark.slow
def test_data_scientist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name, value in environment(ALLHANDS_CURVES="1").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells()])
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, kernel_name="python3", allow_errors=True, resources=where
    ).execute()
    of = [cell.outputs for cell in notebook.cells]
    assert len(of) == 8
    errors = [[one.evalue for one in outputs if one.output_type == "error"] for outputs in of]
    (typo,) = errors.pop(5)
    assert "acuracy" in typo
    assert "did you mean 'accuracy'?" in typo
    assert errors == [[]] * 7
    assert len(shown(of[1], "image/png")) == 1
    assert len(shown(of[2], "image/png")) == 1
    printed = "".join(one.get("text", "") for one in of[2])
    assert "widgets" not in printed
    assert " 6/6 " in printed
    (table,) = shown(of[3], "text/html")
    assert table.count("<tr>") == 7
    assert len(shown(of[4], "image/png")) == 1
    (accuracy,) = shown(of[6], "text/plain")
    assert float(accuracy) > 0.9
    (wrong,) = shown(of[7], "text/plain")
    assert int(wrong) == round((1 - float(accuracy)) * 38)
    logdir = tmp_path / "logs" / "wine"
    assert {"metrics.csv", "curves.png", "report.html"} <= {path.name for path in logdir.iterdir()}
