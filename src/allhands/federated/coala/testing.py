"""Testing the global model: every sample exactly once, dealt to the processes in batches that do
not depend on their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allhands.comm import all_gather_text
from allhands.federated.samples import Samples
from allhands.world import World


def measure(
    model: nn.Module,
    samples: Samples,
    parts: Sequence[torch.Tensor],
    batch_size: int,
    loss_fn: Any,
    world: World,
    seed: int,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Mean loss, and accuracy where outputs are scores of classes, on each part of a data set.

    Args:
        model: on the device of `samples`.
        parts: the indices of each.
        batch_size: samples of a batch.

    Returns:
        The values by name and the numbers of samples: float64, shape ``[parts]``; the same on every
            rank.
    """
    table = torch.zeros(len(parts), 4, dtype=torch.float64, device=samples.device)
    was_training, number = model.training, 0
    model.eval()
    with torch.no_grad():
        for part, indices in enumerate(parts):
            for batch in indices.split(batch_size):
                number += 1
                if number % world.world_size != world.rank:
                    continue
                x, y = samples.take(batch, seed, "test", number)
                output = model(x)
                scores = output.dim() == 2 and y.dim() == 1 and not y.is_floating_point()
                if scores:
                    right = (output.argmax(1) == y).sum()
                else:
                    right = torch.zeros((), device=samples.device)
                counts = torch.stack([loss_fn(output, y).double() * len(y), right.double()])
                table[part, :2] += counts
                table[part, 2] += len(y)
                table[part, 3] += len(y) * scores
    model.train(was_training)
    if world.world_size > 1:
        dist.all_reduce(table)
    table = table.cpu()
    sizes = table[:, 2]
    values = {"loss": table[:, 0] / sizes}
    if bool((table[:, 3] == sizes).all()):
        values["accuracy"] = table[:, 1] / sizes
    return values, sizes


def together(
    values: dict[str, torch.Tensor], sizes: torch.Tensor, weighted: bool
) -> dict[str, float]:
    """The means over clients, all alike or by their samples; clients without samples are left
    out."""
    weights = sizes if weighted else (sizes > 0).double()
    return {
        name: float((value.nan_to_num() * weights).sum() / weights.sum())
        for name, value in values.items()
    }


def gather(own: dict[int, dict[str, float]], world: World) -> dict[int, dict[str, float]]:
    """What each rank has measured, by client, on every rank; a rank may have none."""
    gathered: dict[int, dict[str, float]] = {}
    for text in all_gather_text(json.dumps(own), world):
        gathered.update({int(client): values for client, values in json.loads(text).items()})
    return gathered
