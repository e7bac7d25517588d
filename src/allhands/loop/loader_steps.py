"""The steps of a loader, which can be read again where members of the world change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from allhands.data import Feed
from allhands.loop.position import Position

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop


class LoaderSteps:
    """The steps that are left of a loader's epoch, as this rank's batches.

    Args:
        loop: the training.
        feed: the loader.
        position: how far the epoch has come; is looked at as each step is given.
    """

    def __init__(self, loop: BoundLoop, feed: Feed, position: Position) -> None:
        self._loop, self._name, self._position = loop, feed.name, position
        self._steps = loop.batches_left(feed, position)
        self._again = loop.elastic is not None  # alone asks for a step again
        self._before = self._marks()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            self._before = self._marks()
        try:
            return next(self._steps)
        except Exception:
            # Ctrl-C reaches the loader's processes as well, which end at once.
            if self._loop.agreement.interrupted:
                self._loop.agree()
            raise

    def renew(self) -> None:
        """Read from the position on, in the world as it is now."""
        self._steps = self._loop.batches_left(self._loop.feeds[self._name], self._position)

    def same(self) -> Any:
        """This rank's share now of the step that was given last."""
        now = self._marks()
        self._go_to(self._before)
        self.renew()
        step = next(self._steps)
        self._go_to(now)
        return step

    @property
    def place(self) -> tuple[str, int, int]:
        """Of the step that was given last: the loader, the epoch (or pass) and the samples before
        it."""
        loop, (samples, _, _, place) = self._loop, self._before
        if loop.passes is not None:
            return self._name, place[0], place[1]
        return self._name, 0 if loop.settings.same_epoch else loop.epoch, samples

    def _marks(self) -> tuple[int, int, int, list[int]]:
        loop, position = self._loop, self._position
        place = loop.passes.places.get(self._name, [0, 0]) if loop.passes is not None else [0, 0]
        return position.samples, position.steps, loop.global_step, list(place)

    def _go_to(self, marks: tuple[int, int, int, list[int]]) -> None:
        loop, position = self._loop, self._position
        position.samples, position.steps, loop.global_step, place = marks
        if loop.passes is not None:
            loop.passes.places[self._name] = list(place)
