"""What each strategy does with each example of `examples/own_loop`.

``python -m tests.examples.own_loop_table`` runs the table and renews it in docs/loop.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allhands import DDP, Tensor, UserError
from tests.examples.own_loops import CASES, Case
from tests.worlds import in_world

PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
_LINEAR = {"1": "colwise", "3": "rowwise"}
#: A plan for the models of an example, where they have none of their own.
PLANS: dict[str, dict[str, str]] = {
    "distillation": _LINEAR,
    "ema": _LINEAR,
    "sam": _LINEAR,
    "wgan_gp": {"0": "colwise", "2": "rowwise"},
    "ppo": {
        f"{part}.{layer}": style
        for part in ("actor", "critic")
        for layer, style in ((0, "colwise"), (2, "rowwise"))
    },
}


def _tensor(name: str) -> Tensor:
    return Tensor(plan=PLANS[name]) if name in PLANS else Tensor()


#: For each column the workers, the shares into which they divide a batch, and the strategy.
COLUMNS: dict[str, tuple[int, int, Callable[[str], Any]]] = {
    "single": (1, 1, lambda name: "single"),
    "ddp": (2, 2, lambda name: "ddp"),
    "ddp, sharded state": (2, 2, lambda name: DDP(optimizer_state="sharded")),
    "kvstore": (2, 2, lambda name: "kvstore"),
    "local_sgd": (2, 2, lambda name: "local_sgd"),
    "fsdp": (2, 2, lambda name: "fsdp"),
    "tensor": (2, 1, _tensor),
    "pipeline": (2, 1, lambda name: "pipeline"),
}


def cells(column: str, cases: list[Case]) -> list[str]:
    """For each example "=", "~" where a strategy trains another model by design, "WRONG" with the
    difference, or the refusal."""
    workers, shares, strategy = COLUMNS[column]
    pairs = [(case, strategy(case.name)) for case in cases]
    found = []
    for outcomes in zip(*in_world(workers, _try_all, pairs, shares), strict=True):
        refusals = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if refusals:
            found.append(refusals[0])
        elif max(outcomes) < 1e-5:
            found.append("=")
        else:
            found.append("~" if column == "local_sgd" else f"WRONG by {max(outcomes):.1e}")
    return found


def _try_all(pairs: list[tuple[Case, Any]], shares: int) -> list[float | str]:
    """The difference from what is expected, or the refusal."""
    found: list[float | str] = []
    for case, strategy in pairs:
        try:
            found.append(case.difference(case.train(shares, strategy=strategy)))
        except UserError as error:
            found.append(" ".join(str(error).split()))
    return found


def table(outcomes: dict[str, list[str]]) -> str:
    """The text of the table, with the refusals below it."""
    messages: dict[str, int] = {}
    lines = ["| | " + " | ".join(outcomes) + " |", "|---|" + ":-:|" * len(outcomes)]
    for row, name in enumerate(CASES):
        marks = [
            mark if mark in "=~" else str(messages.setdefault(mark, len(messages) + 1))
            for mark in (column[row] for column in outcomes.values())
        ]
        lines.append(f"| `{name}.py` | " + " | ".join(marks) + " |")
    notes = [f"{number}. {message}" for message, number in messages.items()]
    return "\n".join([*lines, "", *notes])


def shown() -> str:
    """The table in the page."""
    found = re.search(r"^\| \| single \|.*?(?=\n\n## )", PAGE.read_text(), re.M | re.S)
    assert found is not None
    return found[0]


def read() -> dict[str, list[str]]:
    """What the page says, as `cells` gives it, by column."""
    text = shown()
    messages = dict(re.findall(r"^(\d+)\. (.*)$", text, re.M))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert [row[0] for row in rows] == [f"`{name}.py`" for name in CASES]
    return {
        column: [messages.get(row[number], row[number]) for row in rows]
        for number, column in enumerate(head)
        if column
    }


def main(names: list[str]) -> int:
    """Run some columns, or all of them and renew the page."""
    cases = [make() for make in CASES.values()]
    outcomes = {column: cells(column, cases) for column in names or COLUMNS}
    text = table(outcomes)
    print(text)
    if not names:
        PAGE.write_text(PAGE.read_text().replace(shown(), text))
    return int("WRONG" in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
