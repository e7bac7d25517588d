"""Runs the cells of a column in one world of workers, which are kept from cell to cell."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import allhands
from allhands.errors import UserError, WorkerError
from allhands.launch import spawn, worker
from allhands.strategies import Strategy
from tests.conformance.columns import COLUMNS, DP
from tests.conformance.rows import BY_NAME
from tests.conformance.table import Column, Steps, arguments, quiet, train_and_compare
from tests.worlds import ONE_THREAD, PRELOAD

#: Seconds after which a cell hangs. Most take less than one.
LIMIT = 40.0
# What gloo says when another rank has gone.
_LOST = ("closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        kind: "equal" to the loop by hand; "refused" by a `UserError` before the first step;
            "declared": another result, of a strategy that says of itself that it is not exact with
            such an optimizer; else "wrong".
        detail: the largest difference, or the message.
        whole: the ranks have left the cell in step, so that the next one may use their world.
    """

    kind: str
    detail: str
    whole: bool = True


def run_column(
    column: Column, rows: Sequence[str], folder: Path, right: Path
) -> dict[str, Outcome]:
    """The outcome of each row. A world that breaks in a cell is started anew for those after it.

    Args:
        column: the strategy and its world.
        rows: names of the trainings.
        folder: an empty one, for their checkpoints.
        right: one for what the loops by hand give, which columns may share.
    """
    outcomes: dict[str, Outcome] = {}
    left = list(rows)
    while left:
        told: dict[str, dict[int, Outcome]] = {row: {} for row in left}

        def on_message(rank: int, message: dict[str, Any], told: Any = told) -> None:
            if "row" in message:
                told[message["row"]][rank] = Outcome(message["kind"], message["detail"])

        broken = ""
        try:
            spawn(
                _cells,
                (column.name, left, folder, right),
                workers=column.workers,
                servers=column.servers,
                env=ONE_THREAD,
                preload=PRELOAD,
                on_message=on_message,
            )
        except (WorkerError, UserError) as error:
            broken = str(error)
        done = [row for row in left if len(told[row]) == column.workers]
        outcomes |= {row: _of_all_ranks(told[row]) for row in done}
        left = left[len(done) :]
        if broken and left:
            outcomes[left[0]] = Outcome("wrong", f"the world broke: {broken[-1500:]}")
            left = left[1:]
    return outcomes


def _of_all_ranks(outcomes: dict[int, Outcome]) -> Outcome:
    # A rank that has lost the others says nothing of the cause, as where a launcher reports who
    # failed first.
    heard = {
        rank: outcome
        for rank, outcome in outcomes.items()
        if not any(text in outcome.detail for text in _LOST)
    }
    kinds = {outcome.kind for outcome in heard.values()}
    if len(kinds) == 1:
        return max(heard.values(), key=lambda outcome: outcome.detail)
    if kinds == {"equal", "refused"}:
        return Outcome(
            "wrong",
            f"refused on some ranks only: {sorted((rank, o.detail) for rank, o in heard.items())}",
        )
    return next(outcome for outcome in (heard or outcomes).values() if outcome.kind == "wrong")


def _cells(name: str, rows: Sequence[str], folder: Path, right: Path) -> None:
    column = {**COLUMNS, DP.name: DP}[name]
    world = allhands.init(device="cpu")
    try:
        for number, row in enumerate(rows):
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
            own = folder / f"{name}-{number}".replace(" ", "_").replace("'", "")
            outcome = _cell(column, row, own, right)
            faulthandler.cancel_dump_traceback_later()
            worker.send({"row": row, "kind": outcome.kind, "detail": outcome.detail})
            if not outcome.whole:
                return
            if world.world_size > 1:
                torch.distributed.barrier()
    finally:
        allhands.finalize()


def _cell(column: Column, name: str, folder: Path, right: Path) -> Outcome:
    row = BY_NAME[name]
    steps = Steps(row)
    try:
        with quiet():
            given = arguments(row, column, folder, steps)
            apart = (
                row.cell(row, given)
                if row.cell is not None
                else train_and_compare(row, column, given, right)
            )
    except UserError as error:
        whole = not steps.begun  # collectives of a step may be under way
        if steps.taken > steps.before_change:
            return Outcome("wrong", f"refused only after {steps.taken} steps: {error}", whole)
        return Outcome("refused", str(error), whole)
    except Exception as error:
        return Outcome(
            "wrong", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}", False
        )
    if apart <= row.tolerance:
        return Outcome("equal", f"{apart:.1e}")
    strategy = column.strategy(row)
    promised = not isinstance(strategy, Strategy) or strategy.exact_for(
        given["optimizer"], given.get("clip_norm")
    )
    return Outcome("wrong" if promised else "declared", f"{apart:.1e}")
