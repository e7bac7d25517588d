"""Rows of trainings whose steps are the user's own, with `allhands.Loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allhands import Loop
from tests.conformance.models import PLAN, double, mlp
from tests.conformance.table import GLOBAL_BATCH, Row, classes, difference

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass(frozen=True)
class OwnSteps:
    """A cell: trains with a loop of one's own, and as a plain loop.

    Attributes:
        train: ``(loop, batch)`` takes the steps of an iteration.
        plain: ``(models, optimizers, x, y)`` the same by hand, on a global batch.
        names: of the models, of which each has an optimizer.
        teacher: there is another model, which nothing trains.
    """

    train: Callable[[Any, Any], None]
    plain: Callable[[Models, Optimizers, torch.Tensor, torch.Tensor], None]
    names: tuple[str, ...] = ("model",)
    teacher: bool = False

    def __call__(self, row: Row, given: dict[str, Any]) -> float:
        steps = given["callbacks"][0]
        models, optimizers = self.objects(row)
        loop = Loop(
            models=models,
            optimizers=optimizers,
            loaders=given["loaders"],
            strategy=given["distributed"] or None,
            accumulate=given["accumulate"],
            device="cpu",
        )
        for epoch in loop.epochs(row.epochs):
            for batch in epoch.train:
                self.train(loop, batch)
                steps.begun, steps.taken = True, steps.taken + 1
        right, optimizers = self.objects(row)
        for _ in range(row.epochs):
            for x, y in global_batches(row):
                self.plain(right, optimizers, x, y)
        return difference(_states(models), _states(right))

    def objects(self, row: Row) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        models = {name: row.model() for name in self.names}
        optimizers = {name: row.optimizer(model) for name, model in models.items()}
        if self.teacher:
            models["teacher"] = mlp(seed=1)
        return models, optimizers


def global_batches(row: Row) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = row.data()
    for first in range(0, len(data), GLOBAL_BATCH):
        yield data[first : first + GLOBAL_BATCH]


def _states(models: Models) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name, model in models.items()
        for key, value in model.state_dict().items()
    }


# ------------------------------------------------------------------ one model


def cross_entropy(loop: Any) -> Callable[[Any], torch.Tensor]:
    return lambda batch: F.cross_entropy(loop.models["model"](batch[0]), batch[1])


def one(loop: Any, batch: Any) -> None:
    loop.step(cross_entropy(loop), batch)


def plain_one(models: Models, optimizers: Optimizers, x: torch.Tensor, y: torch.Tensor) -> None:
    def compute() -> torch.Tensor:
        optimizers["model"].zero_grad()
        loss = F.cross_entropy(models["model"](x), y)
        loss.backward()
        return loss

    optimizers["model"].step(compute)  # type: ignore[arg-type]


def dict_of_values(loop: Any, batch: Any) -> None:
    def loss_of(batch: Any) -> dict[str, torch.Tensor]:
        output = loop.models["model"](batch[0])
        right = (output.argmax(1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(output, batch[1]), "accuracy": right}

    loop.step(loss_of, batch)


def sum_and_count(loop: Any, batch: Any) -> None:
    def loss_of(batch: Any) -> tuple[torch.Tensor, Any]:
        counts = batch[1] != 0
        losses = F.cross_entropy(loop.models["model"](batch[0]), batch[1], reduction="none")
        return (losses * counts).sum(), counts.sum()

    loop.step(loss_of, batch)


def plain_sum_and_count(
    models: Models, optimizers: Optimizers, x: torch.Tensor, y: torch.Tensor
) -> None:
    plain_one(models, optimizers, x[y != 0], y[y != 0])


def accumulating(loop: Any, batch: Any) -> None:
    with loop.accumulating():
        for x, y in batch.micro_batches:
            loop.backward(F.cross_entropy(loop.models["model"](x), y), count=len(x))


def backward_and_step(loop: Any, batch: Any) -> None:
    x, y = batch
    loop.backward(F.cross_entropy(loop.models["model"](x), y))
    loop.step()


def alike(rows: torch.Tensor) -> torch.Tensor:
    """Another one of rows that are there twice."""
    rows = F.normalize(rows, dim=1)
    return (rows @ rows.t()).logsumexp(1).mean() + rows.var(0).mean()


def gathered(loop: Any, batch: Any) -> None:
    loop.step(lambda batch: alike(loop.gather(loop.models["model"](batch[0]))), batch)


def plain_gathered(
    models: Models, optimizers: Optimizers, x: torch.Tensor, y: torch.Tensor
) -> None:
    optimizers["model"].zero_grad()
    alike(models["model"](x)).backward()
    optimizers["model"].step()


# ------------------------------------------------------------------ several models


def two(loop: Any, batch: Any) -> None:
    a, b = loop.models["a"], loop.models["b"]
    loop.step(lambda batch: F.cross_entropy(b(batch[0]), batch[1]), batch, optimizer="b")
    loop.step(lambda batch: F.mse_loss(a(batch[0]), b(batch[0])), batch, optimizer="a")


def plain_two(models: Models, optimizers: Optimizers, x: torch.Tensor, y: torch.Tensor) -> None:
    a, b = models["a"], models["b"]
    for name in ("b", "a"):
        optimizers[name].zero_grad()
        (F.cross_entropy(b(x), y) if name == "b" else F.mse_loss(a(x), b(x))).backward()
        optimizers[name].step()


def taught(loop: Any, batch: Any) -> None:
    def loss_of(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = loop.models["teacher"](batch[0])
        return F.mse_loss(loop.models["model"](batch[0]), target)

    loop.step(loss_of, batch)


def plain_taught(models: Models, optimizers: Optimizers, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizers["model"].zero_grad()
    F.mse_loss(models["model"](x), models["teacher"](x).detach()).backward()
    optimizers["model"].step()


# ------------------------------------------------------------------ batches of one's own


def rows_of_ones_own(row: Row, given: dict[str, Any]) -> float:
    """Iterations without loaders: each rank takes its share of rows that all make."""
    steps = given["callbacks"][0]
    model, right = row.model(), row.model()
    loop = Loop(
        model=model,
        optimizer=row.optimizer(model),
        strategy=given["distributed"] or None,
        accumulate=given["accumulate"],
        device="cpu",
    )
    batches = list(global_batches(row)) * row.epochs
    for step in loop.steps(len(batches)):
        x, y = batches[step.number - 1]
        mine = slice(*loop.share(len(x)))
        loop.step(lambda own: F.cross_entropy(loop.model(own[0]), own[1]), (x[mine], y[mine]))
        steps.begun, steps.taken = True, steps.taken + 1
    optimizer = row.optimizer(right)
    for x, y in batches:
        plain_one({"model": right}, {"model": optimizer}, x, y)
    return difference(model.state_dict(), right.state_dict())


def row(name: str, cell: Any, **options: Any) -> Row:
    return Row(
        f"own loop, {name}", **{"model": mlp, "optimizer": sgd, **options}, cell=cell, plan=PLAN
    )


OWN_STEPS = [
    row("one model", OwnSteps(one, plain_one)),
    row("a dict of values", OwnSteps(dict_of_values, plain_one)),
    row("sum and count", OwnSteps(sum_and_count, plain_sum_and_count)),
    row("two optimizers", OwnSteps(two, plain_two, ("a", "b"))),
    row("a frozen teacher", OwnSteps(taught, plain_taught, teacher=True)),
    row("gather", OwnSteps(gathered, plain_gathered)),
    row("accumulating()", OwnSteps(accumulating, plain_one)),
    row("backward() and step()", OwnSteps(backward_and_step, plain_one)),
    row(
        "closure (LBFGS)",
        OwnSteps(one, plain_one),
        model=double,
        data=lambda: type(classes())(classes().tensors[0].double(), classes().tensors[1]),
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4),
    ),
    row("rows of one's own", rows_of_ones_own),
]
