"""What each part of a pipeline costs: its parameters, or the time that it takes."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from allhands.errors import UserError
from allhands.strategies.base import TryOn
from allhands.strategies.pipeline_parts import Part, pruned
from allhands.strategies.trial_call import on_training_data, wait_for


def by_parameters(model: nn.Module, parts: list[Part]) -> list[float]:
    return [float(sum(p.numel() for p in pruned(model, part.uses).parameters())) for part in parts]


def measured(
    model: nn.Module, parts: list[Part], example: Any, device: torch.device
) -> tuple[list[float], Any]:
    """Seconds that forward and backward of each part take on this device, and the output of the
    last one.

    Args:
        example: what the model is called with, one micro-batch on the device.
    """
    costs, value = [], example
    for part in parts:
        # A copy, so that neither gradients nor BatchNorm's statistics of the model are touched.
        root = copy.deepcopy(pruned(model, part.uses)).to(device)
        seconds, value = _timed(lambda given: part.run(root, given), value, device)  # noqa: B023
        costs.append(seconds)
    return costs, value


def _timed(run: Callable[[Any], Any], value: Any, device: torch.device) -> tuple[float, Any]:
    """Seconds of ``run(value)`` and its backward pass, the median of three after one that is not
    counted; and what it gives."""
    needs = isinstance(value, torch.Tensor) and value.is_floating_point()
    taken = []
    for _ in range(4):
        given = value.detach().requires_grad_() if needs else value
        wait_for(device)
        began = time.perf_counter()
        result = run(given)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.backward(torch.ones_like(result))
        wait_for(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]), (
        result.detach() if isinstance(result, torch.Tensor) else result
    )


def measured_on(
    try_on: TryOn, model: nn.Module, parts: list[Part], pieces: int, device: torch.device
) -> list[float]:
    """`measured`, on what the runner calls the model with, in the training's precision; the last
    part has the loss too. Random draws are put back.

    Args:
        try_on: calls a module on a micro-batch, ``(module, micro-batches of a batch)``.
        pieces: micro-batches of a batch.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "Pipeline(balance='measured') needs weights that are there, and the model is on the "
            "meta device. Write balance='parameters', or build the model on the CPU"
        )

    def measure(value: Any) -> tuple[list[float], Any]:
        return measured(model, parts, value, device)

    costs, output = on_training_data(try_on, pieces, measure, device)

    if isinstance(output, torch.Tensor) and output.is_floating_point():
        costs[-1] += _of_loss(try_on, output.requires_grad_(), pieces, device)
    return costs


def _of_loss(try_on: TryOn, output: torch.Tensor, pieces: int, device: torch.device) -> float:
    """Seconds of the loss of a micro-batch and its backward pass."""

    class LastOutput(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return output

    loss = try_on(LastOutput(), pieces)

    def run(_: None) -> Any:
        output.grad = None
        found = loss()
        return found[0] if isinstance(found, tuple) else found  # a sum, and what it counts

    return _timed(run, None, device)[0]
