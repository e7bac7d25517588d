"""Epochs of a number of optimizer steps, which go on in the data where the one before them
stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allhands.data import Feed
from allhands.errors import UserError

StepsOf = Callable[[int, int], Iterator[Any]]


class DataPasses:
    """How far each loader that is trained on has been read, over all epochs.

    Attributes:
        places: by loader, the number of the pass over its data and the samples of all ranks that
            were taken in it.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}
        self._open: dict[str, Iterator[Any]] = {}

    def steps(self, feed: Feed, steps_of: StepsOf) -> Iterator[Any]:
        """The next steps of a feed, pass after pass; no step has samples of two passes.

        Args:
            feed: the loader.
            steps_of: ``(pass, samples to skip)`` to the steps that are left in the pass.

        Raises:
            UserError: a pass over the data has no step.
        """
        while True:
            yield from self.rest(feed, steps_of, False)

    def rest(self, feed: Feed, steps_of: StepsOf, begun: bool) -> Iterator[Any]:
        """The steps that are left in the pass over a feed.

        Args:
            feed, steps_of: as for `steps`.
            begun: some of the steps were given already, so that there may be none left. Else, at
                the end of a pass, the steps are those of the next.

        Raises:
            UserError: as for `steps`.
        """
        step = self._next(feed, steps_of)
        if step is None and not begun:
            step = self._next(feed, steps_of)
            if step is None:
                raise UserError(
                    f"loader '{feed.name}' gives no batch, so that there is no step to take"
                )
        while step is not None:
            yield step
            step = self._next(feed, steps_of)

    def _next(self, feed: Feed, steps_of: StepsOf) -> Any:
        """The next step of the pass over a feed; None where it ends."""
        place = self.places.setdefault(feed.name, [0, 0])
        if feed.name not in self._open:
            self._open[feed.name] = steps_of(place[0], place[1])
        step = next(self._open[feed.name], None)
        if step is None:
            del self._open[feed.name]
            place[:] = [place[0] + 1, 0]
        return step

    def took(self, feed: Feed, samples: int) -> None:
        """A step with so many samples of all ranks was taken."""
        self.places[feed.name][1] += samples

    def is_within(self, name: str) -> bool:
        """Whether a loader is in the middle of a pass."""
        return name in self.places and self.places[name][1] > 0

    def close(self) -> None:
        """End the reading."""
        for steps in self._open.values():
            steps.close()  # type: ignore[attr-defined]
        self._open.clear()
