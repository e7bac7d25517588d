"""The changes with which a training that does not fit a GPU would fit, by their plans."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from allhands.data import map_tensors
from allhands.errors import UserError
from allhands.loop.out_of_memory import SHOWN, halved, in_gb
from allhands.planning.candidates import Candidate, candidates
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
    own, gpus = Candidate(strategy, {"name": strategy.name}), max(2, workers)

    def look(way: Candidate, count: int = workers, parts: int = 1, **options: Any) -> Any:
        """The prediction of one way; None where it is refused, or there is no time left."""
        if time.monotonic() - began > _PATIENCE_S:
            return None
        one = {**given, **options, "batch": _part(given["batch"], samples, parts)}
        try:
            return plan(**one, strategies=[way], gpus=count, memory=room).rows[0]
        except UserError:
            return None

    now = look(own)
    if now is None or now.fits:  # something else takes the room
        return []
    accumulate = given["accumulate"]
    again = look(replace(own, recompute=True))
    changes = [("activation_checkpointing=True, which computes layers twice", again)]
    if samples > 1 and samples % 2 == 0:
        halves = look(own, parts=2, accumulate=2 * accumulate)
        changes.append((halved(samples, accumulate), halves))
    changes.sort(key=lambda one: -_speed(one[1]))
    if given["precision"] == "fp32":
        changes.append(("precision='bf16', which rounds", look(own, precision="bf16")))
    if sum(row is not None and row.fits for _, row in changes) < SHOWN:
        more = []
        for way in candidates(gpus, gpus):
            if workers > 1 and way.name == own.name:
                continue
            row = look(way, gpus)
            if row is not None and not row.fits:
                row = look(replace(way, recompute=True), gpus)
            more.append(row)
        for row in sorted(filter(None, more), key=lambda row: -_speed(row)):
            if workers == 1:
                changes.append((f"2 GPUs with {row.name}", row))
            elif row.exact:
                changes.append((f"{row.name} in the place of {own.name}", row))
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
