"""What a training's step takes of a GPU's memory: as planned, and as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allhands.data import tensors_in
from allhands.loop import peak
from allhands.loop.out_of_memory import in_plan
from allhands.loop.reporter import Reporter
from allhands.public_names import public

if TYPE_CHECKING:
    from allhands.loop.optimizer_group import OptimizerGroup
    from allhands.loop.settings import LoopSettings
    from allhands.loop.task import Task
    from allhands.world import World

#: Optimizer steps after which the memory is measured: captured ones have been captured by then.
MEASURED_AFTER = 10


class MemoryForecast:
    """Prints what a step of rank 0 is planned to take of its GPU, and what the first steps took.

    A process of its own plans at the lowest priority, while steps are taken. Nothing is printed
    without a GPU, for steps of a user's own or compiled ones, and of a model that cannot be
    planned. A training that ends before the answer does not wait for it.

    Args:
        settings, world, reporter, task: of a training whose strategy is not bound yet, since a
            plan takes the whole model.
    """

    def __init__(
        self, settings: LoopSettings, world: World, reporter: Reporter, task: Task
    ) -> None:
        self._settings, self._world, self._reporter, self._task = settings, world, reporter, task
        self._process: Any = None
        self._whole: Any = None
        self._planned: int | None = None
        self._steps = self._elsewhere = 0
        trial = settings.limit is not None or settings.cut_short
        seen = type(reporter) is not Reporter and world.rank == 0 and world.device.type == "cuda"
        self.goes_on = seen and not trial and settings.step != "compile"
        if self.goes_on and task.runner is not None:
            self._try(self._copy)
        else:
            self.goes_on = False

    def look(self, group: OptimizerGroup, batch: Any) -> None:
        """A step follows.

        Args:
            group: the model and its optimizer.
            batch: what `OptimizerStep` is called with.
        """
        if self.goes_on:
            self._try(lambda: self._look(group, batch))

    def close(self) -> None:
        """Nothing more is printed."""
        self.goes_on = False
        if self._process is not None:
            self._process.close()
            self._process = None

    def _try(self, do: Any) -> None:
        try:
            do()
        except Exception:  # a model that cannot be planned trains all the same
            self.close()

    def _copy(self) -> None:
        settings = self._settings
        self._whole = public("planning").meta_copies(settings.model, settings.optimizer)

    def _look(self, group: OptimizerGroup, batch: Any) -> None:
        if self._process is None and self._planned is None:
            self._begin(group, batch)
        elif self._process is not None and not self._process.runs:
            process, self._process = self._process, None
            self._tell(process.answer(0.0))
        if self._planned is not None and self._steps >= MEASURED_AFTER:
            self._measure()
        self._steps += 1

    def _begin(self, group: OptimizerGroup, batch: Any) -> None:
        settings, world = self._settings, self._world
        states = [one for state in group.optimizer.state.values() for one in tensors_in(state)]
        on_gpu = sum(one.nbytes for one in states if one.device == world.device)
        self._elsewhere = torch.cuda.memory_allocated(world.device) - on_gpu
        model, optimizer = self._whole
        given = in_plan(settings, self._task, batch) | {
            "model": model,
            "optimizer": optimizer,
            "samples": max(batch[1]),
            "activation_checkpointing": settings.activation_checkpointing,
            "step": "eager" if group.captured is None else "graph",
        }
        self._whole = None
        major, _ = torch.cuda.get_device_capability(world.device)
        ranks = world.world_size, world.rank, world.local_world_size
        self._process = public("planning").begin_step_memory(
            given, settings.strategy, *ranks, hopper=major >= 9
        )

    def _tell(self, found: Any) -> None:
        # What lies on the GPU beside the training: data, other models.
        beside = max(0, self._elsewhere - found.at_start)
        self._planned = found.peak + beside
        kinds = {**found.kinds, "data and others": beside}
        most = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
        parts = ", ".join(f"{kind} {peak.size_of(kinds[kind])}" for kind in most if kinds[kind])
        self._reporter.line(
            f"memory: {peak.size_of(self._planned)} of tensors on the GPU{self._where} as planned "
            f"({parts})"
        )

    def _measure(self) -> None:
        assert self._planned is not None
        taken, device = peak.taken(self._world), self._world.device
        reserved = torch.cuda.max_memory_reserved(device)
        self._reporter.line(
            f"memory: {peak.size_of(taken)} measured in {self._steps} steps, planned were "
            f"{peak.size_of(self._planned)}; PyTorch's allocator holds {peak.size_of(reserved)}"
        )
        self.close()

    @property
    def _where(self) -> str:
        return " of rank 0" if self._world.world_size > 1 else ""
