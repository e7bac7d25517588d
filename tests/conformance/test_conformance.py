"""Every training under every strategy: equal to a plain loop in one process, or refused by name
before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from allhands.strategies import STRATEGIES
from tests.conformance import page
from tests.conformance.cells import run_column
from tests.conformance.columns import COLUMNS, DP, OTHER
from tests.conformance.rows import BY_NAME, ROWS

# Each differs from two other columns only in what these try. Of each, `make test` tries every
# fourth row, and of the next column the row after it, so that every row comes several times.
COMBINED = (
    "single, accumulate 2",
    "single, accumulate 3",
    "ddp x 2, accumulate 2",
    "ddp x 3",
    "ddp x 2, sharded state",
    "kvstore x 2, worker's update",
    "kvstore x 2, 1 server",
    "kvstore x 2, 2 servers, worker's update",
    "fsdp x 2, accumulate 2",
    "dp 2 x shard 2",
    "dp 2 x tp 2",
    "pp 2 x dp 2",
)
# `make test-all` alone tries them, since the columns beside them differ by a number.
RARE = ("single, accumulate 3", "kvstore x 2, 2 servers, worker's update")


def parts() -> list[Any]:
    """Names of columns and the rows to try; those of `make test-all` are marked as rare."""
    tried = []
    for name in COLUMNS:
        rows = list(BY_NAME)
        if name in COMBINED and name not in RARE:
            some = rows[COMBINED.index(name) % 4 :: 4]
            tried.append(pytest.param(name, some, id=f"{name}, every fourth row"))
            rows = [row for row in rows if row not in some]
        rare = [pytest.mark.rare] if name in COMBINED else []
        tried.append(pytest.param(name, rows, id=name, marks=rare))
    return tried


@pytest.fixture
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `right_of`, which the processes of a test run share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "conformance").mkdir(exist_ok=True)
    return folder / "conformance"


@pytest.mark.serial
@pytest.mark.parametrize(("name", "rows"), parts())
def test_every_cell_is_equal_or_refused(
    name: str, rows: list[str], tmp_path: Path, right: Path, record_property: Any
) -> None:
    outcomes = run_column(COLUMNS[name], rows, tmp_path, right)
    kinds = {row: outcome.kind for row, outcome in outcomes.items()}
    record_property("conformance", [name, kinds])
    wrong = {row: outcome.detail for row, outcome in outcomes.items() if outcome.kind == "wrong"}
    assert not wrong, "\n".join(f"{row}: {detail}" for row, detail in wrong.items())
    shown = {row: kind for row, kind in page.read()[name].items() if row in rows}
    assert set(rows) == set(shown)
    assert kinds == shown, (
        "docs/what-works.md says otherwise; renew it with `make conformance`: "
        f"{changed(kinds, shown)}"
    )


@pytest.mark.gpu
def test_every_cell_of_dp_is_equal_or_refused(tmp_path: Path, right: Path) -> None:
    outcomes = run_column(DP, list(BY_NAME), tmp_path, right)
    assert not {row: outcome.detail for row, outcome in outcomes.items() if outcome.kind == "wrong"}


def changed(ours: dict[str, str], shown: dict[str, str]) -> list[str]:
    return sorted(row for row in ours.keys() | shown.keys() if ours.get(row) != shown.get(row))


def test_every_registered_strategy_is_in_the_table() -> None:
    tried = {column.covers for column in [*COLUMNS.values(), DP]}
    assert not STRATEGIES.keys() - tried - OTHER.keys()


def test_rows_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(ROWS)


@pytest.mark.parametrize(("own", "share"), [(False, 0.81), (True, 0.7)])
def test_the_share_of_equal_cells_does_not_fall(own: bool, share: float) -> None:
    kinds = [
        kind
        for column in page.read().values()
        for row, kind in column.items()
        if row.startswith("own loop") == own
    ]
    assert "wrong" not in kinds
    assert kinds.count("equal") >= share * len(kinds)
