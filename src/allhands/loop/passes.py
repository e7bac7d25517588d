"""Epochs of a number of optimizer steps, which go on in the data where the one before them
stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allhands.data import Feed
from allhands.errors import UserError


class DataPasses:
    """How far each loader that is trained on has been read, over all epochs.

    Attributes:
        places: by loader, the number of the pass over its data and the samples of all ranks that
            were taken in it.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}
        self._open: dict[str, Iterator[Any]] = {}

    def steps(
        self, feed: Feed, steps_of: Callable[[int, int], Iterator[Any]], number: int
    ) -> Iterator[Any]:
        """The next `number` steps of a feed; no step has samples of two passes.

        Args:
            feed: the loader.
            steps_of: ``(pass, samples to skip)`` to the steps that are left in the pass.
            number: of steps.

        Raises:
            UserError: a pass over the data has no step.
        """
        place = self.places.setdefault(feed.name, [0, 0])
        for _ in range(number):
            step, began = None, 0
            while step is None:
                if feed.name not in self._open:
                    if began == 2:  # the first may be one that goes on at its end
                        raise UserError(
                            f"loader '{feed.name}' gives no batch, so that there is no step to take"
                        )
                    self._open[feed.name] = steps_of(place[0], place[1])
                    began += 1
                step = next(self._open[feed.name], None)
                if step is None:
                    del self._open[feed.name]
                    place[:] = [place[0] + 1, 0]
            yield step

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
