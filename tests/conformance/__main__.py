"""`python -m tests.conformance [column or row …]`: run the table, or a part, and renew its cells in
docs/what-works.md."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.conformance.cells import Outcome, run_column
from tests.conformance.columns import COLUMNS
from tests.conformance.page import PAGE, read_outcomes, write
from tests.conformance.rows import BY_NAME


def main(names: list[str]) -> int:
    """Returns 1 when a cell is neither equal nor refused."""
    unknown = [name for name in names if name not in COLUMNS and name not in BY_NAME]
    if unknown:
        print(
            f"no column or row {unknown[0]!r}; columns: {', '.join(COLUMNS)}; rows: "
            f"{', '.join(BY_NAME)}"
        )
        return 2
    columns = [name for name in names if name in COLUMNS] or list(COLUMNS)
    rows = [name for name in names if name in BY_NAME] or list(BY_NAME)
    table: dict[str, dict[str, Outcome]] = {}
    right = Path(tempfile.mkdtemp())
    for name in columns:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            table[name] = run_column(COLUMNS[name], rows, Path(folder), right)
        print(f"== {name}: {time.perf_counter() - started:.0f} s", flush=True)
        for row in rows:
            outcome = table[name][row]
            print(
                f"  {outcome.kind:8s} {row}: "
                f"{outcome.detail[: 1000 if outcome.kind == 'wrong' else 200]}",
                flush=True,
            )
    shutil.rmtree(right)
    wrong = any(
        outcome.kind == "wrong" for outcomes in table.values() for outcome in outcomes.values()
    )
    if not names or not wrong:
        before = read_outcomes() if names else {}
        whole = {name: before.get(name, {}) | table.get(name, {}) for name in COLUMNS}
        PAGE.write_text(
            write({name: {row: whole[name][row] for row in BY_NAME} for name in COLUMNS})
        )
        print(f"written to {PAGE}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
