"""What a training that has run out of a GPU's memory can be changed to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from allhands.loop.settings import LoopSettings
from allhands.world import World

if TYPE_CHECKING:
    from allhands.strategies import Strategy

_SHOWN = 3


def what_takes_less(settings: LoopSettings, samples: int, world: World) -> str:
    """The cheapest changes that take less memory, as a note to PyTorch's error.

    Args:
        settings: of the training.
        samples: in this rank's largest micro-batch.
        world: the ranks.
    """
    changes = list(_changes(settings, samples, world))[:_SHOWN]
    several = f"{world.world_size} workers" if world.world_size > 1 else "one worker"
    return (
        f"allhands: out of memory with {settings.strategy.in_words()} on {several}, micro-batches "
        f"of {samples} samples. What takes less, the cheapest first: {'; '.join(changes)}. "
        "`allhands plan` tells what each takes (docs/planning.md)"
    )


def _changes(settings: LoopSettings, samples: int, world: World) -> Iterator[str]:
    strategy: Strategy = settings.strategy
    if samples > 1:
        yield (
            f"batches of {-(-samples // 2)} samples with accumulate={2 * settings.accumulate}, "
            "which are the same steps"
        )
    if not settings.activation_checkpointing and strategy.recomputing_refused() is None:
        yield "activation_checkpointing=True, which computes layers twice"
    if strategy.name == "ddp" and world.world_size > 1 and not strategy.parted:
        yield "DDP(optimizer_state='sharded')"
    if strategy.name in ("single", "ddp"):
        yield "distributed='fsdp'" + ("" if world.world_size > 1 else " on several GPUs")
    if settings.precision == "fp32":
        yield "precision='bf16', which rounds"
    yield "more GPUs in a mesh of fsdp, tensor or pipeline"


def samples_of(batch: Any) -> int:
    """In the largest micro-batch of what `OptimizerStep` is called with."""
    return max(batch[1], default=0)
