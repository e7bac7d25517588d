"""What the caller of a training gets back from the workers, in the objects that were passed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from allhands.comm import all_gather_rows, calls
from allhands.launch import handback, results
from allhands.loop.reporter import Reporter
from allhands.loop.settings import is_meta
from allhands.runner.train_settings import TrainSettings
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.runner import Runner

# A rank reads its share of them alone.
_DATA = (Dataset, DataLoader, Sampler)


def send(runner: Runner, settings: TrainSettings, world: World, reporter: Reporter) -> None:
    """Hand back what this node's first worker has trained and collected; all ranks call it
    together."""
    if world.local_rank != 0:
        return
    # The weights of a model on the meta device are in the checkpoints.
    left = (*_DATA, nn.Module, torch.optim.Optimizer) if is_meta(settings.model) else _DATA
    roots: dict[str, Any] = {**settings.trained, "runner": runner}
    roots |= {f"callbacks[{index}]": callback for index, callback in enumerate(settings.callbacks)}
    lost = handback.write(roots, lambda value: isinstance(value, left))
    if lost:
        reporter.line(
            f"note: not handed back, and as it was before the training: {'; '.join(lost)}"
        )


def gather(value: Any, world: World) -> list[Any]:
    """Every rank's value, by rank; all ranks call it together.

    Raises:
        UserError: a value is not data.
    """
    calls.note("gathering values of the ranks")
    file = io.BytesIO()
    results.save(value, file, "training.gather was given")
    rows = all_gather_rows(
        torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(world.device), world
    )
    return [results.read(io.BytesIO(row.cpu().numpy().tobytes())) for row in rows]


def place(settings: TrainSettings, home: torch.device) -> None:
    """Move what was trained elsewhere to the device where the model was."""
    if is_meta(settings.model):
        return
    settings.model.to(home)
    for optimizer in settings.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    for criterion in settings.criteria:
        criterion.to(home)
