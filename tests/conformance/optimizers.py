"""Optimizers as people take them from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones of another optimizer every k steps (Zhang et al.,
    2019)."""

    elementwise = True

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.clone())
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter]["slow"]
                    slow.add_(parameter - slow, alpha=self.alpha)
                    parameter.copy_(slow)


class Closure(torch.optim.SGD):
    """Computes the gradient twice in a step, as SAM does (Foret et al., 2021)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            closure()
        apart = [0.05 * p.grad for p in parameters]
        for p, step in zip(parameters, apart, strict=True):
            p.add_(step)
        with torch.enable_grad():
            closure()
        for p, step in zip(parameters, apart, strict=True):
            p.sub_(step)
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights in training are not those of evaluation (Defazio et al., 2024)."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() before a step")
            group["k"] += 1
            weight = 1 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, weight)
                parameter.add_(
                    parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1)
                )
                z.sub_(parameter.grad, alpha=group["lr"])


def three_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with a rate for each third of the model."""
    layers = [layer for layer in model if any(True for _ in layer.parameters())]  # type: ignore[attr-defined]
    return torch.optim.AdamW(
        [
            {"params": layer.parameters(), "lr": 0.01 * (number + 1)}
            for number, layer in enumerate(layers)
        ],
        weight_decay=0.05,
    )
