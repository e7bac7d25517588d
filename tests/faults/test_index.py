"""The table in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (HERE / "README.md").read_text())
    assert len(named) > 40
    for file, test in named:
        path = HERE / file if "/" not in file else HERE.parents[1] / file
        assert f"def {test}(" in path.read_text(), f"{file}::{test}"
