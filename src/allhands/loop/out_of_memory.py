"""What a training that has run out of a GPU's memory can be changed to."""

from __future__ import annotations

import time
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

_SHOWN = 3
# Seconds after which no further change is planned.
_PATIENCE_S = 20.0


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
            f"{state}What would fit {_gb(_room(world))}, as planned, the cheapest first: "
            f"{'; '.join(changes[:_SHOWN])}. docs/planning.md says how exact a plan is"
        )
    changes = list(_changes(settings, samples, world))[:_SHOWN]
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
    room, runner, strategy = _room(world), task.runner, settings.strategy
    whole = strategy.name in ("single", "ddp", "kvstore", "local_sgd")
    if not (whole and room and runner is not None and not settings.activation_checkpointing):
        return []
    largest = max(zip(batch[0], batch[1], strict=True), key=lambda pair: pair[1])[0]
    given = {
        "model": settings.model,
        "criterion": task.criterion,
        "optimizer": settings.optimizer,
        "batch": map_tensors(largest, lambda tensor: tensor.detach().cpu()),
        "precision": settings.precision,
        "accumulate": settings.accumulate,
        "clip_norm": settings.clip_norm,
        "runner": runner,
    }
    if world.world_size == 1:
        return changes_that_fit(given, strategy, 1, samples, room)
    from allhands.planning.dry_step import meta_copies
    from allhands.planning.own_process import in_own_process

    given["model"], given["optimizer"] = meta_copies(settings.model, settings.optimizer)
    found: list[str] = in_own_process(
        changes_that_fit,
        given,
        strategy,
        world.world_size,
        samples,
        room,
        seconds=2 * _PATIENCE_S,
    )
    return found


def changes_that_fit(
    given: dict[str, Any], strategy: Strategy, workers: int, samples: int, room: float
) -> list[str]:
    """Changes that would fit, the cheapest first; none where the training fits as it is.

    Args:
        given: the training, as `allhands.plan` takes it.
        strategy: of the training.
        workers: how many there are.
        samples: of a micro-batch.
        room: bytes of a GPU.
    """
    from allhands.planning.candidates import Candidate

    began = time.monotonic()
    own = strategy.name
    present = [Candidate(strategy, {"name": own}, again) for again in (False, True)]

    def rows(gpus: int = workers, divided: int = 1, **options: Any) -> dict[str, Any]:
        if time.monotonic() - began > _PATIENCE_S:
            return {}
        one = {"strategies": present, **given, **options, "gpus": gpus, "memory": room}
        one["batch"] = _part(given["batch"], samples, divided)
        return {row.name: row for row in public("plan")(**one).rows if not row.refused}

    now = rows()
    if own not in now or now[own].fits:  # something else takes the room
        return []
    again = f"{own} recompute"
    found = [("activation_checkpointing=True, which computes layers twice", now, again)]
    accumulate = given["accumulate"]
    if samples > 1 and samples % 2 == 0:
        words = _halved(samples, accumulate)
        found.append((words, rows(divided=2, accumulate=2 * accumulate), own))
    found.sort(key=lambda one: -_speed(one[1].get(one[2])))
    if given["precision"] == "fp32":
        found.append(("precision='bf16', which rounds", rows(precision="bf16"), own))
    changes = [(words, by_name.get(name)) for words, by_name, name in found]
    if sum(row is not None and row.fits for _, row in changes) < _SHOWN:
        more = rows(gpus=max(2, workers), strategies=None)
        for name, row in sorted(more.items(), key=lambda one: -_speed(one[1])):
            if workers == 1:
                changes.append((f"2 GPUs with {name}", row))
            elif name not in (own, again) and row.exact:
                changes.append((f"{name} in the place of {own}", row))
    return [f"{words} ({_gb(row.peak)})" for words, row in changes if row is not None and row.fits]


def _speed(row: Any) -> float:
    return 0.0 if row is None else float(row.samples_per_second)


def _part(example: Any, samples: int, divided: int) -> Any:
    """The first part of a batch."""
    if divided == 1:
        return example
    return map_tensors(
        example,
        lambda one: one[: samples // divided] if one.dim() and len(one) == samples else one,
    )


def _room(world: World) -> float:
    """Bytes of this rank's GPU; 0 where there is none."""
    if world.device.type != "cuda":
        return 0.0
    return float(torch.cuda.get_device_properties(world.device).total_memory)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _halved(samples: int, accumulate: int) -> str:
    return (
        f"batches of {-(-samples // 2)} samples with accumulate={2 * accumulate}, which are the "
        "same steps"
    )


def _changes(settings: LoopSettings, samples: int, world: World) -> Iterator[str]:
    strategy: Strategy = settings.strategy
    if samples > 1:
        yield _halved(samples, settings.accumulate)
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
