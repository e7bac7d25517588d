"""A model whose optimizer steps are captured or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allhands.step import CapturedSteps, LossRule, OptimizerStep, Precision
from allhands.step.exchange import Exchange, Placement
from allhands.world import World
from tests.function_graphs import FunctionGraphs

CPU = torch.device("cpu")
MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
OPTIMIZERS = [
    (torch.optim.SGD, MOMENTUM),
    (torch.optim.Adam, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-3}),
]


def world_on(device: torch.device) -> World:
    return World(0, 0, 0, 1, 1, device, "none", "alone")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )


class Trained:
    """A model with an optimizer, and its steps captured or not."""

    def __init__(
        self,
        model: nn.Module,
        kind: Any,
        options: dict[str, Any],
        device: torch.device = CPU,
        captured: bool = True,
        insist: bool = False,
        graphs: FunctionGraphs | None = None,
        clip: float | None = 0.5,
        criterion: nn.Module | None = None,
        outputs: str = "kept",
    ) -> None:
        criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        self.model = model.to(device)
        self.optimizer = kind(self.model.parameters(), **options)
        self.losses: list[float] = []
        self.outputs: list[torch.Tensor | None] = []
        self.said: list[str] = []
        world = world_on(device)
        placement, exchange = Placement(self.model, world), Exchange()

        def observe(
            output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
        ) -> None:
            self.losses.append(float(loss.detach()) * factor)
            self.outputs.append(None if output is None else output.detach())

        self.make = lambda: OptimizerStep(
            self.model.parameters(),
            self.optimizer,
            LossRule(criterion),
            placement,
            exchange,
            world,
            Precision("fp32", device),
            lambda batch: (self.model(batch[0].to(device)), batch[1].to(device)),
            observe,
            lambda batch: batch[1].to(device),
            clip,
        )
        self.captured = None
        if captured:
            self.graphs = graphs or FunctionGraphs()
            self.captured = CapturedSteps(
                self.model,
                None,
                self.optimizer,
                device,
                outputs,
                device.type == "cuda",
                insist,
                self.said.append,
                self.graphs if device.type == "cpu" else None,
            )
            self.graphs.steps = self.captured
            self.captured.begin()
        self.take = self.make()

    def steps(self, batches: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        if self.captured is not None:
            self.captured.look()
        for micro in batches:
            counts = [len(batch[0]) for batch in micro]
            if self.captured is None:
                self.take(micro, counts, sum(counts), False)
            else:
                self.captured(self.take, micro, counts, sum(counts), False)


def data(
    steps: int, sizes: tuple[int, ...] = (8,), seed: int = 0
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(size, 6, generator=drawn), torch.randint(3, (size,), generator=drawn))
            for size in sizes
        ]
        for _ in range(steps)
    ]


def apart(one: nn.Module, other: nn.Module) -> float:
    return max(
        float((a - b).abs().max())
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def without_dropout() -> nn.Module:
    model = network()
    model[3].p = 0.0
    return model
