"""Scripts of other libraries, before and after: the pages count what has changed, and both run."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, example_module, program, run_in
from tests.worlds import in_world

pytestmark = pytest.mark.usefixtures("forked_python")

FOLDER = EXAMPLES / "moving"
NAMES = ["fabric", "accelerate", "ddp"]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_counts_the_lines(name: str) -> None:
    before, after = (FOLDER / f"{name}_{when}.py" for when in ("before", "after"))
    lines = [len(path.read_text().splitlines()) for path in (before, after)]
    shown = subprocess.run(["diff", before, after], capture_output=True, text=True).stdout
    changed = sum(line.startswith(">") for line in shown.splitlines())
    page = (EXAMPLES.parent / "docs" / f"migrate_{name}.md").read_text()
    said = re.search(r"(\d+) lines have become (\d+), of which (\d+) are new", page)
    assert said is not None
    assert [int(number) for number in said.groups()] == [*lines, changed]


def train(name: str, epochs: int) -> None:
    example_module(f"moving/{name}_after").main(epochs)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("name", "column", "low", "high"),
    [
        ("fabric", "valid_loss", 20, 40),
        ("accelerate", "valid_accuracy", 0.6, 1),
        ("ddp", "valid_accuracy", 0.6, 1),
    ],
)
def test_the_new_script_trains_on_two_workers(
    name: str, column: str, low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_world(2, train, name, 4)
    text = (tmp_path / "logs" / name / "metrics.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 4
    assert low < float(rows[-1][column]) < high


@pytest.mark.rare
@pytest.mark.serial
@pytest.mark.parametrize("name", NAMES)
def test_the_old_script_trains(name: str, tmp_path: Path) -> None:
    if name != "ddp":
        pytest.importorskip({"fabric": "lightning"}.get(name, name))
    said = run_in(
        tmp_path, program("allhands"), "launch", "-n", "1", str(FOLDER / f"{name}_before.py")
    )
    assert "epoch 9:" in said
