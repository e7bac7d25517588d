"""The optimizers' updates of some rows of a table, in the order of torch's plain loops. Each row
counts its own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_States = dict[str, Tensor]
_Options = dict[str, Any]
_Update = Callable[[Tensor, Tensor, _States, _Options], None]


def _of_steps(steps: Tensor, like: Tensor, formula: Callable[[int], float]) -> Tensor:
    """A number for each row from how often it was pushed, shape [n, 1]; Python's arithmetic, as
    torch's optimizers have it."""
    different, which = torch.unique(steps, return_inverse=True)
    return torch.tensor([formula(step) for step in different.tolist()], dtype=torch.float64).to(
        like.dtype
    )[which, None]


def _decay(rows: Tensor, grads: Tensor, options: Mapping[str, Any]) -> Tensor:
    return grads.add(rows, alpha=options["weight_decay"]) if options["weight_decay"] != 0 else grads


def _sgd(rows: Tensor, grads: Tensor, states: _States, options: _Options) -> None:
    grads = _decay(rows, grads, options)
    momentum = options["momentum"]
    if momentum != 0:
        buffer = states["momentum_buffer"]
        buffer.mul_(momentum).add_(grads, alpha=1 - options["dampening"])
        new = states["step"] == 1
        buffer[new] = grads[new]
        grads = grads.add(buffer, alpha=momentum) if options["nesterov"] else buffer
    rows.add_(grads, alpha=-options["lr"])


def _adagrad(rows: Tensor, grads: Tensor, states: _States, options: _Options) -> None:
    grads = _decay(rows, grads, options)
    rate = _of_steps(
        states["step"], rows, lambda step: -options["lr"] / (1 + (step - 1) * options["lr_decay"])
    )
    states["sum"].addcmul_(grads, grads, value=1)
    rows.add_((grads * rate).div_(states["sum"].sqrt().add_(options["eps"])))


def _adam(rows: Tensor, grads: Tensor, states: _States, options: _Options) -> None:
    if not options.get("decoupled_weight_decay", False):
        grads = _decay(rows, grads, options)
    elif options["weight_decay"] != 0:
        rows.mul_(1 - options["lr"] * options["weight_decay"])
    beta1, beta2 = options["betas"]
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    mean.lerp_(grads, 1 - beta1)
    square.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    if options["amsgrad"]:
        square = torch.maximum(states["max_exp_avg_sq"], square, out=states["max_exp_avg_sq"])
    rate = _of_steps(states["step"], rows, lambda step: -options["lr"] / (1 - beta1**step))
    scale = _of_steps(states["step"], rows, lambda step: (1 - beta2**step) ** 0.5)
    rows.add_((mean * rate).div_(square.sqrt().div_(scale).add_(options["eps"])))


def _adamw(rows: Tensor, grads: Tensor, states: _States, options: _Options) -> None:
    _adam(rows, grads, states, {**options, "decoupled_weight_decay": True})


def _rmsprop(rows: Tensor, grads: Tensor, states: _States, options: _Options) -> None:
    grads = _decay(rows, grads, options)
    alpha, square = options["alpha"], states["square_avg"]
    square.mul_(alpha).addcmul_(grads, grads, value=1 - alpha)
    if options["centered"]:
        mean = states["grad_avg"].lerp_(grads, 1 - alpha)
        size = square.addcmul(mean, mean, value=-1).sqrt_()
    else:
        size = square.sqrt()
    size.add_(options["eps"])
    if options["momentum"] > 0:
        rows.add_(
            states["momentum_buffer"].mul_(options["momentum"]).addcdiv_(grads, size),
            alpha=-options["lr"],
        )
    else:
        rows.addcdiv_(grads, size, value=-options["lr"])


UPDATES: dict[str, _Update] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
}
