"""What the ranks of an elastic training have measured, which each tells the others in every step:
one of them may not be there to tell it later."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_rows, calls
from allhands.loop.checkpoint import tree
from allhands.loop.logged import Sums

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop

Part = dict[str, torch.Tensor]


class SharedMeasures:
    """The measures of all ranks by the last step that was taken."""

    def __init__(self, loop: BoundLoop) -> None:
        self._loop = loop
        # What all ranks had measured by the last step, and of which loader.
        self._measured: tuple[Any, list[Part]] | None = None
        # What was logged on this rank: as the unit began, and what of it all ranks know.
        self._logged: Sums = ({}, {})
        self._shared: Sums = ({}, {})
        # The same once the step that is being taken has ended.
        self._next_measured: tuple[Any, list[Part]] | None = None
        self._next_shared: Sums = ({}, {})
        #: The other ranks know what this one has measured before the update of the step.
        self.is_shared = False

    def begin_unit(self) -> None:
        """What all ranks do together begins."""
        self._logged = self._loop.logged.copy()
        self.is_shared = False

    def share(self) -> None:
        """Tell the other ranks what this one has measured; no rank leaves before all have come."""
        loop, world = self._loop, self._loop.world
        calls.note("sharing what was measured")
        mine = {} if loop.measure is None else loop.measure.partial()
        mine |= {f"logged/{name}": value for name, value in loop.logged.partial().items()}
        numbers = mine.pop("numbers", torch.empty(0, dtype=torch.float64))
        more = _packed(mine) if mine else b""
        row = torch.cat([numbers, torch.tensor([len(more)], dtype=torch.float64)])
        rows = [one.cpu() for one in all_gather_rows(row.to(world.device)[None], world)]
        parts = [{"numbers": one[0, :-1]} for one in rows]
        if any(float(one[0, -1]) for one in rows):
            data = torch.frombuffer(bytearray(more), dtype=torch.uint8) if more else None
            data = torch.empty(0, dtype=torch.uint8) if data is None else data
            further = all_gather_rows(data.to(world.device), world)
            for part, own in zip(parts, further, strict=True):
                part.update(_unpacked(own) if len(own) else {})
        self._next_measured, self._next_shared = (loop.measure, parts), loop.logged.copy()
        self.is_shared = True

    def step_taken(self) -> None:
        """The step is taken, before whose update the ranks have shared."""
        if self._loop.measure is not None:
            self._measured, self._shared = self._next_measured, self._next_shared

    def forget(self) -> None:
        """What was measured is told, and begins anew."""
        self._measured, self._shared = None, ({}, {})

    def state(self) -> dict[str, Any]:
        """For a rank that is not as far: of tensors and plain data."""
        if self._measured is None:
            return {"of": None, "parts": None}
        measure, parts = self._measured
        name = next(name for name, one in self._loop.measures.items() if one is measure)
        return {"of": name, "parts": parts}

    def load_state(self, state: dict[str, Any], step_was_taken: bool) -> None:
        """Take what `state` gave on another rank, which has taken the step that this rank was
        taking, or has not."""
        if step_was_taken:
            self._logged = self._shared = self._next_shared
        if state["parts"] is not None:
            self._measured = self._loop.measures[state["of"]], state["parts"]

    def take_up(self) -> None:
        """One rank goes on with what all ranks have measured, those that are gone among them."""
        # Before the first step has ended, only the one that failed was measured.
        measure, parts = self._measured or (self._loop.measure, [])
        if measure is None:
            return
        names = sorted({name for part in parts for name in part if name.startswith("logged/")})
        loop, first = self._loop, self._loop.takes_sums()
        measure.start(measure.where)
        loop.logged.start()
        measure.take_up([_without(part, "logged/") for part in parts] if first else [])
        logged = [tree.under(part, "logged/") for part in parts] if first else []
        loop.logged.take_up(logged, [name.removeprefix("logged/") for name in names])
        # What was logged here since the ranks have shared theirs.
        (sums, weights), (shared, counted) = self._logged, self._shared
        self._shared = loop.logged.copy()
        for name, total in sums.items():
            count = weights[name] - counted.get(name, 0.0)
            if count > 0:
                loop.logged.add(name, (total - shared.get(name, 0.0)) / count, count)
        self._logged = loop.logged.copy()


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)


def _without(part: Part, prefix: str) -> Part:
    return {key: value for key, value in part.items() if not key.startswith(prefix)}
