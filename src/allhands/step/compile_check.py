"""Whether a model that is compiled gives the gradients that it gives as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from allhands.data import preserved_generators
from allhands.step.guards import HostState
from allhands.step.optimizer_step import OptimizerStep


def losses_and_gradients(
    take: OptimizerStep,
    modules: Sequence[Any],
    batches: Sequence[Any],
    counts: Sequence[int],
    total: int,
    rounded: bool = False,
) -> list[torch.Tensor]:
    """The losses of a step's micro-batches, one after another, and this rank's gradients, from
    passes that leave nothing behind: no update, draw, buffer or attribute, and no exchange but one
    that is part of the passes.

    Args:
        take: takes such steps.
        modules: the model and the criterion.
        batches, counts, total: micro-batches, samples in each, samples in the global batch.
        rounded: the weights are others by as much as the precision rounds.

    Raises:
        ValueError: the passes change what a replay would not.
    """
    losses: list[torch.Tensor] = []
    before = [parameter.grad for parameter in take.parameters]
    observe = take.observe
    take.observe = lambda output, target, loss, *measured: losses.append(loss.detach().reshape(()))
    host = HostState(*modules)
    try:
        weights = take.parameters if rounded else []
        with (
            preserved_generators(),
            _preserved_buffers(modules),
            _rounded(weights, take.precision.epsilon),
        ):
            take.forward_backward(batches, counts, total, idle=True)
            changed = host.changed()
        if changed is not None:
            raise ValueError(changed)
        found = [p.grad for p in take.parameters if p.grad is not None]
    finally:
        host.restore_attributes()
        take.observe = observe
        for parameter, gradient in zip(take.parameters, before, strict=True):
            parameter.grad = gradient
    return [*([torch.stack(losses)] if losses else []), *map(_local, found)]


def relative_gaps(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[str, float]:
    """How far two results of `losses_and_gradients` differ, in parts of the norm of the first."""
    if [tensor.shape for tensor in ones] != [tensor.shape for tensor in others]:
        return {"losses": math.inf, "gradients": math.inf}
    return {"losses": _gap(ones[:1], others[:1]), "gradients": _gap(ones[1:], others[1:])}


def _gap(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    apart = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(ones, others, strict=True)
    )
    whole = sum(float(a.double().square().sum()) for a in ones)
    return (apart / max(whole, 1e-300)) ** 0.5


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that lies in parts, or all of it."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return part


def _local(gradient: Any) -> torch.Tensor:
    part = local_part(gradient)
    return part.to_dense() if part.is_sparse else part


@contextmanager
def _rounded(parameters: Sequence[nn.Parameter], relative: float) -> Iterator[None]:
    """Within, weights differ by up to a part of themselves, the same on all ranks."""
    weights = [_local(parameter.detach()) for parameter in parameters]
    kept = [values.clone() for values in weights]
    generators: dict[torch.device, torch.Generator] = {}
    for values in weights:
        drawn = generators.setdefault(values.device, torch.Generator(values.device).manual_seed(0))
        noise = torch.rand(values.shape, generator=drawn, device=values.device)
        values.mul_(1.0 + relative * (2.0 * noise - 1.0).to(values.dtype))
    try:
        yield
    finally:
        for values, before in zip(weights, kept, strict=True):
            values.copy_(before)


@contextmanager
def _preserved_buffers(modules: Sequence[Any]) -> Iterator[None]:
    """Leave the buffers as they were found."""
    kept = [
        (owner, name, buffer, buffer.clone())
        for module in modules
        if isinstance(module, nn.Module)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in kept:
                owner._buffers[name] = buffer.copy_(values)
