"""What a training that has run out of a GPU's memory can be changed to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from allhands.data import map_tensors
from allhands.loop.settings import LoopSettings
from allhands.loop.task import Task
from allhands.public_names import public
from allhands.world import World

if TYPE_CHECKING:
    from allhands.strategies import Strategy

SHOWN = 3


def what_takes_less(settings: LoopSettings, batch: Any, world: World, task: Task) -> str:
    """The cheapest changes that take less memory, as a note to PyTorch's error.

    Args:
        settings: of the training.
        batch: what `OptimizerStep` was called with.
        world: the ranks.
        task: what is computed.
    """
    samples = _samples_of(batch)
    several = f"{world.world_size} workers" if world.world_size > 1 else "one worker"
    state = (
        f"allhands: out of memory with {settings.strategy.in_words()} on {several}, micro-batches "
        f"of {samples} samples. "
    )
    try:
        changes = _planned(settings, batch, samples, world, task)
    except Exception:  # of a model that cannot be planned; the user's error is the one to tell
        changes = []
    if changes:
        return (
            f"{state}What would fit {in_gb(_room(world))}, as planned, the cheapest first: "
            f"{'; '.join(changes[:SHOWN])}. docs/planning.md says how exact a plan is"
        )
    changes = list(_changes(settings, samples, world))[:SHOWN]
    return (
        f"{state}What takes less, the cheapest first: {'; '.join(changes)}. "
        "`allhands plan` tells what each takes (docs/planning.md)"
    )


def _planned(
    settings: LoopSettings, batch: Any, samples: int, world: World, task: Task
) -> list[str]:
    """Changes that would fit by their plans, with what they take, where a plan sees that the
    training does not fit. Each rank must hold the whole model under its own names: what has been
    cut cannot be planned again. Where there are several workers, a process of its own plans."""
    room, strategy = _room(world), settings.strategy
    if not (strategy.whole_model and room and task.runner is not None):
        return []
    if settings.activation_checkpointing:
        return []
    given = in_plan(settings, task, batch)
    found: list[str] = public("planning").fitting_changes(
        given, strategy, world.world_size, samples, room
    )
    return found


def in_plan(settings: LoopSettings, task: Task, batch: Any) -> dict[str, Any]:
    """The training as `allhands.plan` takes it; of its batch the whole numbers lie on the
    processor, and others have no data.

    Args:
        settings, task: of the training.
        batch: what `OptimizerStep` is called with.
    """
    largest = max(zip(batch[0], batch[1], strict=True), key=lambda pair: pair[1])[0]
    return {
        "model": settings.model,
        "criterion": task.criterion,
        "optimizer": settings.optimizer,
        "batch": map_tensors(
            largest,
            lambda one: (
                torch.empty_like(one, device="meta")
                if one.is_floating_point()
                else one.detach().cpu()
            ),
        ),
        # In fp8 are only factors of products, while they are multiplied.
        "precision": "bf16-true" if settings.precision == "fp8" else settings.precision,
        "accumulate": settings.accumulate,
        "clip_norm": settings.clip_norm,
        "runner": task.runner,
        "keeps_outputs": task.outputs == "kept",
    }


def _room(world: World) -> float:
    """Bytes that this rank may take of its GPU; 0 where there is none."""
    if world.device.type != "cuda":
        return 0.0
    total = torch.cuda.get_device_properties(world.device).total_memory
    return total * torch.cuda.get_per_process_memory_fraction(world.device)


def in_gb(size: float) -> str:
    """Bytes, in words."""
    return f"{size / 1e9:.3g} GB"


def halved(samples: int, accumulate: int) -> str:
    """The change to batches of half the samples, in words."""
    return (
        f"batches of {-(-samples // 2)} samples with accumulate={2 * accumulate}, which are the "
        "same steps"
    )


def _changes(settings: LoopSettings, samples: int, world: World) -> Iterator[str]:
    strategy: Strategy = settings.strategy
    if samples > 1:
        yield halved(samples, settings.accumulate)
    if not settings.activation_checkpointing and strategy.recomputing_refused() is None:
        yield "activation_checkpointing=True, which computes layers twice"
    if strategy.name == "ddp" and world.world_size > 1 and not strategy.parted:
        yield "DDP(optimizer_state='sharded')"
    if strategy.name in ("single", "ddp"):
        yield "distributed='fsdp'" + ("" if world.world_size > 1 else " on several GPUs")
    if settings.precision == "fp32":
        yield "precision='bf16', which rounds"
    yield "more GPUs in a mesh of fsdp, tensor or pipeline"


def _samples_of(batch: Any) -> int:
    """In the largest micro-batch of what `OptimizerStep` is called with."""
    return max(batch[1], default=0)
