"""Where in a forward pass each worker of a tensor-parallel group has features of its own, and draws
random numbers of its own."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from allhands.errors import UserError
from allhands.step.guards import capturing


class Region:
    """The part of a forward pass in which each worker has features of its own, from a colwise
    module to a rowwise one.

    Dropout there draws numbers of the worker's own; everywhere else all workers of the group draw
    the same. Its seed is drawn from the common generator, so that nothing is to be saved beside
    that one's state, and a forward pass that is run again (activation checkpointing) draws the
    same. Where nothing is drawn, the generators stay as they were.

    Attributes:
        opened_by: the colwise module whose output is in parts now; None outside.
        looking: whether to refuse modules that cannot be right here; until the first forward pass
            has ended.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.rank = mesh.get_local_rank()
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[index])
        self.opened_by: str | None = None
        self.looking = True
        self._drawn = False  # something has drawn numbers there
        # Of the generators: before the seed was drawn, after it, and with the worker's own seed.
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []

    def open(self, name: str, draws: bool) -> None:
        if self.opened_by is None:
            self.opened_by = name
            if draws:
                self._draw_own()

    def close(self) -> None:
        self.opened_by = None
        if not self._before:
            return
        drawn = not all(map(torch.equal, self._states(), self._own))
        self._drawn = self._drawn or drawn
        for generator, state in zip(
            self.generators, self._after if drawn else self._before, strict=True
        ):
            generator.set_state(state)
        self._before, self._after, self._own = [], [], []

    def close_after_error(self, output: object) -> None:
        """Close when a module was left half way, and so gave nothing: by an error, or by activation
        checkpointing, which computes a layer again only as far as it must."""
        if output is None:
            self.close()

    def check_closed(self) -> None:
        """Raise `UserError` when the model's output is a part of it; called at the end of each
        forward pass."""
        if self.looking and self.opened_by is not None:
            raise UserError(
                f"'{self.opened_by}' is colwise, and no rowwise module brings its parts together "
                "again; make the one that takes "
                f"its output 'rowwise', or '{self.opened_by}' 'vocab', which gathers its outputs"
            )
        self.looking = False

    def _draw_own(self) -> None:
        if capturing():
            if self._drawn:
                raise RuntimeError(
                    "dropout between colwise and rowwise modules draws numbers of each worker's "
                    "own, by a seed that is kept on the host"
                )
            return
        self._before = self._states()
        seed = int(torch.randint(2**60, ())) + self.rank
        self._after = self._states()
        for generator in self.generators:
            generator.manual_seed(seed)
        self._own = self._states()

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def refuse_inside(self, name: str, style: str) -> None:
        if self.looking and self.opened_by is not None:
            raise UserError(
                f"'{name}' ({style}) runs after '{self.opened_by}' (colwise) and before a rowwise "
                f"module, where each worker has a part of the features; make '{name}' 'rowwise', "
                f"or '{self.opened_by}' 'vocab', which gathers its outputs"
            )
