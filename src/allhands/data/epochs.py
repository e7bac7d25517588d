"""Telling the user's own objects which epoch begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Where an object keeps another one: Subset and ConcatDataset, batch samplers, partials and bound
# methods as collate functions.
_INSIDE = ("dataset", "datasets", "sampler", "func", "__self__")


class EpochListeners:
    """Those of some objects, and of what lies inside them, that have a `set_epoch`."""

    def __init__(self, *objects: Any) -> None:
        self._found: dict[int, Any] = {}
        seen: set[int] = set()
        for each in objects:
            self._found |= {
                id(one): one
                for one in _walk(each, seen)
                if callable(getattr(one, "set_epoch", None))
            }

    def __bool__(self) -> bool:
        return bool(self._found)

    def set_epoch(self, epoch: int) -> None:
        """Tell all of them."""
        for each in self._found.values():
            each.set_epoch(epoch)

    def names(self) -> str:
        """Their classes, for a message."""
        return ", ".join(type(each).__name__ for each in self._found.values())


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if value is None or id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    yield value
    for name in _INSIDE:
        inner = getattr(value, name, None)
        for each in inner if isinstance(inner, (list, tuple)) and name == "datasets" else [inner]:
            if not isinstance(each, (str, int, float, list, tuple, dict)):
                yield from _walk(each, seen)
