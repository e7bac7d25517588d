"""The changes with which a training that does not fit a GPU would fit, by their plans."""

from __future__ import annotations

import time
from typing import Any

from allhands.data import map_tensors
from allhands.loop.out_of_memory import SHOWN, halved, in_gb
from allhands.planning.candidates import Candidate
from allhands.planning.dry_step import meta_copies
from allhands.planning.own_process import OwnProcess
from allhands.planning.plan import plan
from allhands.strategies import Strategy

# Seconds after which no further change is planned.
_PATIENCE_S = 20.0


def fitting_changes(
    given: dict[str, Any], strategy: Strategy, workers: int, samples: int, room: float
) -> list[str]:
    """Changes that would fit, the cheapest first; none where the training fits as it is. Where
    there are several workers, a process of its own plans.

    Args:
        given: the training, as `allhands.plan` takes it.
        strategy: of the training.
        workers: how many there are.
        samples: of a micro-batch.
        room: bytes of a GPU.
    """
    if workers == 1:
        return _changes_that_fit(given, strategy, 1, samples, room)
    model, optimizer = meta_copies(given["model"], given["optimizer"])
    given = {**given, "model": model, "optimizer": optimizer}
    process = OwnProcess(_changes_that_fit, given, strategy, workers, samples, room)
    found: list[str] = process.answer(2 * _PATIENCE_S)
    return found


def _changes_that_fit(
    given: dict[str, Any], strategy: Strategy, workers: int, samples: int, room: float
) -> list[str]:
    """What `fitting_changes` gives, by plans of this process."""
    began = time.monotonic()
    own = strategy.name
    present = [Candidate(strategy, {"name": own}, again) for again in (False, True)]

    def rows(gpus: int = workers, divided: int = 1, **options: Any) -> dict[str, Any]:
        if time.monotonic() - began > _PATIENCE_S:
            return {}
        one = {"strategies": present, **given, **options, "gpus": gpus, "memory": room}
        one["batch"] = _part(given["batch"], samples, divided)
        return {row.name: row for row in plan(**one).rows if not row.refused}

    now = rows()
    if own not in now or now[own].fits:  # something else takes the room
        return []
    again = f"{own} recompute"
    found = [("activation_checkpointing=True, which computes layers twice", now, again)]
    accumulate = given["accumulate"]
    if samples > 1 and samples % 2 == 0:
        words = halved(samples, accumulate)
        found.append((words, rows(divided=2, accumulate=2 * accumulate), own))
    found.sort(key=lambda one: -_speed(one[1].get(one[2])))
    if given["precision"] == "fp32":
        found.append(("precision='bf16', which rounds", rows(precision="bf16"), own))
    changes = [(words, by_name.get(name)) for words, by_name, name in found]
    if sum(row is not None and row.fits for _, row in changes) < SHOWN:
        more = rows(gpus=max(2, workers), strategies=None)
        for name, row in sorted(more.items(), key=lambda one: -_speed(one[1])):
            if workers == 1:
                changes.append((f"2 GPUs with {name}", row))
            elif name not in (own, again) and row.exact:
                changes.append((f"{name} in the place of {own}", row))
    return [
        f"{words} ({in_gb(row.peak)})" for words, row in changes if row is not None and row.fits
    ]


def _speed(row: Any) -> float:
    return 0.0 if row is None else float(row.samples_per_second)


def _part(example: Any, samples: int, divided: int) -> Any:
    """The first part of a batch."""
    if divided == 1:
        return example
    return map_tensors(
        example, lambda one: one[: samples // divided] if one.dim() and len(one) == samples else one
    )
