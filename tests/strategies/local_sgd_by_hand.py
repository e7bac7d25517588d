"""Local SGD by hand in one process that plays all workers, and the training beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from allhands import MuonAdamW, SupervisedRunner
from tests.reference import global_batches
from tests.runner.problems import classification, classifier

SAMPLES, BATCH, EPOCHS = (
    50,
    4,
    3,
)  # with 3 workers, the last step of an epoch has two samples, so that one of them is idle
NESTEROV = {"name": "nesterov", "lr": 0.5, "momentum": 0.8}
FRAGMENTS = {
    1: [["0.weight", "0.bias", "3.weight", "3.bias"]],
    2: [["0.weight", "0.bias"], ["3.weight", "3.bias"]],
}
Vector = torch.Tensor
Weights = dict[str, torch.Tensor]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.02)
    if name == "muon":
        return MuonAdamW(model, lr=0.02)
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9 if name == "momentum" else 0.0, weight_decay=0.01
    )


class ByHand:
    """All workers of a world, one after another in plain PyTorch."""

    def __init__(
        self,
        workers: int,
        every: int,
        outer: Any = "average",
        fragments: int = 1,
        compress: Any = None,
        mix: float = 0.0,
        optimizer: str = "sgd",
        clip_norm: float | None = None,
        overlap: int = 0,
    ) -> None:
        self.overlap = overlap
        self.under_way: dict[int, tuple[int, Vector]] = {}
        self.every, self.outer, self.compress, self.mix, self.clip_norm = (
            every,
            outer,
            compress,
            mix,
            clip_norm,
        )
        self.fragments = FRAGMENTS[fragments]
        self.models = [classifier() for _ in range(workers)]
        self.optimizers = [make_optimizer(optimizer, model) for model in self.models]
        self.anchor = copy.deepcopy(self.models[0].state_dict())
        self.velocity = {name: torch.zeros_like(value) for name, value in self.anchor.items()}
        self.seen = [[0] * workers for _ in self.fragments]
        self.lost: list[list[Any]] = [[0.0] * workers for _ in self.fragments]
        self.owed: list[list[Any]] = [[0.0] * workers for _ in self.fragments]
        self.steps, self.data = 0, classification(SAMPLES).tensors

    def train(self, batches: Sequence[torch.Tensor]) -> ByHand:
        for rows in batches:
            for worker, share in enumerate(torch.tensor_split(rows, len(self.models))):
                if len(share):
                    self.step(worker, share)
            self.steps += 1
            for number in range(len(self.fragments)):
                if self.under_way.get(number, (None,))[0] == self.steps:
                    self.apply(number, self.under_way.pop(number)[1])
                if (
                    self.steps - (number + 1) * self.every // len(self.fragments)
                ) % self.every == 0:
                    self.bring_together(number)
        return self

    def step(self, worker: int, rows: torch.Tensor) -> None:
        model = self.models[worker]
        model.zero_grad()
        nn.functional.cross_entropy(model(self.data[0][rows]), self.data[1][rows]).backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
        self.optimizers[worker].step()
        for seen in self.seen:
            seen[worker] += len(rows)

    def vector(self, number: int, weights: Any) -> Vector:
        return torch.cat([weights[name].flatten() for name in self.fragments[number]]).clone()

    def bring_together(self, number: int) -> None:
        seen, before = self.seen[number], self.vector(number, self.anchor)
        deltas = [before - self.vector(number, model.state_dict()) for model in self.models]
        if self.compress is None:
            mean = torch.stack(
                [delta * (n / sum(seen)) for delta, n in zip(deltas, seen, strict=True)]
            ).sum(0)
        else:
            mean = self.through_narrow_wires(number, deltas)
        self.seen[number] = [0] * len(seen)
        if self.overlap:
            self.under_way[number] = (self.steps + self.overlap, mean)
        else:
            self.apply(number, mean)

    def apply(self, number: int, mean: Vector) -> None:
        before = self.vector(number, self.anchor)
        names, velocity = self.fragments[number], self.vector(number, self.velocity)
        if self.outer == "average":
            after = before - mean
        else:
            velocity = self.outer["momentum"] * velocity + mean
            after = before - self.outer["lr"] * (mean + self.outer["momentum"] * velocity)
        start = 0
        with torch.no_grad():
            for name in names:
                shape, stop = self.anchor[name].shape, start + self.anchor[name].numel()
                self.anchor[name], self.velocity[name] = (
                    after[start:stop].view(shape),
                    velocity[start:stop].view(shape),
                )
                for model in self.models:
                    own = dict(model.named_parameters())[name]
                    own.copy_(self.mix * own + (1 - self.mix) * self.anchor[name])
                start = stop

    def through_narrow_wires(self, number: int, deltas: list[Vector]) -> Vector:
        """The mean of what arrives: each worker takes the mean of one part, and sends it on."""
        seen, workers, size = self.seen[number], len(deltas), len(deltas[0])
        length = -(-size // workers)
        pieces = [
            slice(worker * length, min((worker + 1) * length, size)) for worker in range(workers)
        ]
        mean = torch.zeros(size)
        for worker, delta in enumerate(deltas):
            if not seen[worker]:
                continue
            wanted = delta + self.lost[number][worker]
            arrived = torch.cat([narrow(wanted[piece], self.compress) for piece in pieces])
            self.lost[number][worker] = wanted - arrived
            mean += arrived * (seen[worker] / sum(seen))
        for worker, piece in enumerate(pieces):
            wanted = mean[piece] + self.owed[number][worker]
            mean[piece] = narrow(wanted, self.compress)
            self.owed[number][worker] = wanted - mean[piece]
        return mean

    def mean(self) -> Weights:
        """Of the present weights, by the samples seen since the last exchange."""
        found: Weights = {}
        for names, seen in zip(self.fragments, self.seen, strict=True):
            parts = [n / sum(seen) if sum(seen) else 1 / len(seen) for n in seen]
            for name in names:
                found[name] = sum(
                    part * model.state_dict()[name]
                    for part, model in zip(parts, self.models, strict=True)
                )
        return {name: found[name] for name in self.anchor}


def narrow(values: Vector, compress: Any) -> Vector:
    """What arrives of numbers; these are too few for more than one scale."""
    if compress in ("bf16", "fp16"):
        return values.to(torch.bfloat16 if compress == "bf16" else torch.float16).float()
    if compress == "1bit":
        return torch.where(values >= 0, 1.0, -1.0) * values.abs().mean()
    if compress == "int8":
        scale = values.abs().max() / 127
        return (values / scale).round().clamp(-127, 127) * scale if scale else values
    least = values.abs().sort(descending=True).values[math.ceil(compress["keep"] * len(values)) - 1]
    return torch.where(values.abs() >= least, values, 0.0)


def steps_of(workers: int, count: int) -> list[torch.Tensor]:
    batches = global_batches(SAMPLES, BATCH * workers, 42)
    return [next(batches) for _ in range(count)]


def train(
    strategy: Any,
    optimizer: str = "sgd",
    epochs: int = EPOCHS,
    samples: int = SAMPLES,
    norm: bool = False,
    **options: Any,
) -> Any:
    model = classifier()
    if norm:
        model[1] = nn.BatchNorm1d(16)  # type: ignore[operator]
    chosen = make_optimizer(optimizer, model)
    data = classification(samples)
    loaders = {"train": DataLoader(data, BATCH, shuffle=True), "valid": DataLoader(data, BATCH)}
    options = {"criterion": nn.CrossEntropyLoss()} | options
    history = SupervisedRunner(device="cpu").train(
        model=model,
        optimizer=chosen,
        num_epochs=epochs,
        distributed=strategy,
        loaders=loaders,
        verbose=False,
        **options,
    )
    return model, chosen, history
