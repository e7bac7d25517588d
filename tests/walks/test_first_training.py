"""From `pip install` to the first own training, typed from the README."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.examples.running import run_in
from tests.walks.walking import environment, in_order

pytestmark = pytest.mark.usefixtures("forked_python")

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Those of the README's way to a training of one's own."""
    (block,) = re.findall(r"^## Your own training\n.*?^```bash\n(.*?)^```", README, re.M | re.S)
    return [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]


def test_they_are_at_most_ten() -> None:
    found = commands()
    assert found[0].startswith("pip install")
    assert len(found) <= 10


@pytest.mark.serial
def test_they_train_on_rows_of_ones_own(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(80, 5))
    classes = rows[:, :2].argmax(axis=1)
    np.savetxt(
        tmp_path / "mine.csv",
        np.column_stack([rows, classes]),
        delimiter=",",
        header="a,b,c,d,e,class",
        comments="",
        fmt="%.6g",
    )
    script = "\n".join(["set -eu", *commands()[1:]])
    text = run_in(tmp_path, "sh", "-c", script, env=environment())
    in_order(text, "written to project", "64 samples", "8/8 ", "written to logs/first")
    assert (tmp_path / "project" / "logs" / "first" / "metrics.csv").is_file()
