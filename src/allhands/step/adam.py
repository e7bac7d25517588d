"""Adam's step on a CPU with less of Python around its operations.

``Adam.step`` and the functions that it calls ask many questions whose answers are known for plain
tensors in memory: of a small model that takes as long as half of the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NUMBERS = (float, int)
# Of a parameter: itself, its gradient and its state.
_Place = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def adam_step(
    step: Callable[[torch.optim.Optimizer], object],
) -> Callable[[torch.optim.Optimizer], object]:
    """A function that does what `step` does with an ``Adam`` or ``AdamW``, to the bit: by the same
    operations in the same order where the options and tensors are plain ones, by `step` otherwise.

    Args:
        step: the optimizer's own step, called where something is not plain, and the first time: it
            makes the state.
    """

    def update(optimizer: torch.optim.Optimizer) -> object:
        groups = _plain_groups(optimizer)
        if groups is None:
            return step(optimizer)
        with torch.no_grad():
            for group, places in groups:
                _update(group, places)
        return None

    return update


def _plain_groups(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[dict[str, Any], list[_Place]]] | None:
    """The groups, each with its parameters that have a gradient; None where something is not
    plain."""
    if getattr(optimizer, "grad_scale", None) is not None:
        return None
    if getattr(optimizer, "found_inf", None) is not None:
        return None
    groups, states = [], optimizer.state
    for group in optimizer.param_groups:
        first, second = group["betas"]
        if (
            type(group["lr"]) not in _NUMBERS
            or type(first) not in _NUMBERS
            or type(second) not in _NUMBERS
            or type(group["weight_decay"]) not in _NUMBERS
            or _asks_for_another_way(group)
        ):
            return None
        places = []
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            state = states.get(parameter)
            if (
                not state
                or not parameter.is_cpu
                or type(parameter) not in (torch.nn.Parameter, torch.Tensor)
                or type(grad) is not torch.Tensor
                or not parameter.is_floating_point()
                or grad.layout is not torch.strided
            ):
                return None
            places.append((parameter, grad, state))
        groups.append((group, places))
    return groups


def _asks_for_another_way(group: dict[str, Any]) -> bool:
    return bool(
        group["amsgrad"]
        or group["maximize"]
        or group["capturable"]
        or group["differentiable"]
        or group["foreach"]
        or group["fused"]
    )


def _update(group: dict[str, Any], places: list[_Place]) -> None:
    (first, second), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    for parameter, made, state in places:
        grad = made
        count, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
        count += 1
        if decay != 0:
            if group["decoupled_weight_decay"]:
                parameter.mul_(1 - rate * decay)
            else:
                grad = grad.add(parameter, alpha=decay)
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        taken = count.item()
        root = square.sqrt().div_((1 - second**taken) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(mean, root, value=-(rate / (1 - first**taken)))
