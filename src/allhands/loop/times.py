"""Where the time of a training goes, on the host of this rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: What is measured; the rest of the time is of steps.
BEGIN, DATA, EVALUATION = "begin, restore, place the model", "wait for batches", "evaluation"
CHECKPOINTS = "checkpoints"


class Times:
    """Seconds by what they were spent on, since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """What runs in this context is `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(what, time.perf_counter() - began)

    def begun(self) -> None:
        """The first step can be taken."""
        self._spent.setdefault(BEGIN, time.perf_counter() - self._began)

    def over(self, what: str, steps: Iterable[Any]) -> Iterator[Any]:
        """The same steps; from the first to the last, all is `what`."""
        with self.of(what):
            yield from steps

    def reading(self, steps: Iterable[Any]) -> Iterator[Any]:
        """The same steps; what it takes to have the next one is time that is waited for batches."""
        iterator, clock, spent = iter(steps), time.perf_counter, 0.0
        try:
            while True:
                began = clock()
                step = next(iterator, None)
                spent += clock() - began
                if step is None:
                    return
                yield step
        finally:
            self._add(DATA, spent)

    def _add(self, what: str, seconds: float) -> None:
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    def parts(self, rest: str = "steps, and all else") -> dict[str, float]:
        """Seconds by what they were spent on, until now."""
        whole = time.perf_counter() - self._began
        return self._spent | {rest: max(0.0, whole - sum(self._spent.values()))}
