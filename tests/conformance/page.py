"""The page docs/what-works.md: made from the outcomes, and read back by the test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.conformance.cells import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "what-works.md"
HEAD = """# What works with what

Each row is a training, each column a strategy on some workers. A cell with **=** ends with the
weights, the buffers and the reported loss of a plain PyTorch loop in one process, to 1e-5 of their
largest values. A number stands for a refusal before the first step (for a change that a callback
makes: before the first step after it), with the message that is listed below. A training is either
right or refused, but for **~**: `local_sgd` says of itself that it is another training with
momentum, other optimizers than SGD, or clipping.

`make conformance` runs the table and writes this page. `make test-all` runs it too, and fails where
a cell is neither, or is not what this page says; `make test` tries one column of each strategy
whole, and every fourth row of those that combine or vary others. The trainings are in
`tests/conformance/rows.py`, the columns in `tests/conformance/columns.py`. With `accumulate` above
1, and in a pipeline, a model that counts its calls is compared with a loop that makes as many.
Statistics of BatchNorm are each worker's own in training and averaged before
evaluation, see [exactness](exactness.md); that row compares the weights with a loop over the same
shares. fp16 is compared with what rounding does to a loop.

A row gives `Tensor(plan=…)` a plan for its model, as the refusal of a model without one says; the
plan cuts some layers and leaves the others whole. Where the refusals of models and optimizers say
so, too, a model has a method `chain()`, and Lookahead and the schedule-free optimizer say
`elementwise = True`.

Rows of an *own loop* are trainings with [`allhands.Loop`](loop.md), whose steps the user writes.

`dp` needs GPUs, and is refused elsewhere. `federated` trains other weights by design.

"""
MARKS = {"equal": "=", "declared": "~", "wrong": "WRONG"}


def write(table: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The page of a whole table, ``{column: {row: outcome}}``."""
    rows = list(next(iter(table.values())))
    messages: dict[str, int] = {}
    lines = ["| | " + " | ".join(table) + " |", "| --- |" + " :-: |" * len(table)]
    for row in rows:
        marks = []
        for outcomes in table.values():
            outcome = outcomes[row]
            if outcome.kind == "refused":
                marks.append(str(messages.setdefault(_plain(outcome.detail), len(messages) + 1)))
            else:
                marks.append(MARKS[outcome.kind])
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    equal = sum(
        outcome.kind == "equal" for outcomes in table.values() for outcome in outcomes.values()
    )
    share = (
        f"\n{equal} of {len(rows) * len(table)} cells are equal, "
        f"{100 * equal / (len(rows) * len(table)):.0f} %.\n"
    )
    refusals = [f"{number}. {message}" for message, number in messages.items()]
    return HEAD + "\n".join(lines) + "\n" + share + "\n## Refusals\n\n" + "\n".join(refusals) + "\n"


def read() -> dict[str, dict[str, str]]:
    """The kinds that the page shows, ``{column: {row: kind}}``."""
    kinds = {mark: kind for kind, mark in MARKS.items()}
    return {
        column: {row: kinds.get(mark, "refused") for row, mark in rows.items()}
        for column, rows in _cells().items()
    }


def _cells() -> dict[str, dict[str, str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        column: {row[0]: row[number + 1] for row in cells[2:]}
        for number, column in enumerate(cells[0][1:])
    }


def read_outcomes() -> dict[str, dict[str, Outcome]]:
    """The table that the page shows, as `write` takes it."""
    found = re.findall(r"^(\d+)\. (.*)$", PAGE.read_text(), re.MULTILINE)
    messages = {number: text.replace(r"\*", "*").replace("&lt;", "<") for number, text in found}
    kinds, marks = read(), _cells()
    return {
        column: {
            row: Outcome(kind, messages.get(marks[column][row], "")) for row, kind in rows.items()
        }
        for column, rows in kinds.items()
    }


def _plain(message: str) -> str:
    """A message without what differs between ranks."""
    text = re.sub(r"\brank \d+\b", "rank N", " ".join(message.split()))
    return text.replace("<", "&lt;").replace("*", r"\*")
