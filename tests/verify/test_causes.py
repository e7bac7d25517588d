"""Each cause of a difference, by a training that has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from allhands import DDP, UserError
from allhands.strategies.base import Bound
from allhands.world import World
from tests.verify.problems import data, only, verified

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def test_dropout() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    row = only(
        verified(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    )
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "loss")
    assert row.causes[0].startswith("dropout: with 1 off the difference disappears")


class DrawsByHand(nn.Module):
    """Random numbers in the forward pass that belong to no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x) if self.training else x)


def test_random_numbers_in_the_forward_pass() -> None:
    torch.manual_seed(1)
    model = DrawsByHand()
    row = only(
        verified(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    )
    assert row.verdict == "DIFFERS"
    assert row.causes[0].startswith(
        "training mode: the model draws random numbers in its forward pass"
    )


class Augmented(Dataset[Any]):
    """Noise on every sample, from a generator of its own."""

    def __init__(self) -> None:
        self.data = data()
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.from_numpy(self.generator.normal(0, 0.1, 5)).float(), y


def test_a_data_set_with_a_generator_of_its_own() -> None:
    row = only(verified(loaders={"train": DataLoader(Augmented(), 6, shuffle=True)}, steps=3))
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "samples")
    assert row.causes[0].startswith(
        "random data: the data set of loader 'train' gives another sample when it is read again"
    )


def root_mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (nn.functional.one_hot(target, 4) - output).square().mean().sqrt()


def test_a_loss_that_is_no_mean_over_samples_is_refused_as_by_the_training() -> None:
    with pytest.raises(
        UserError, match="root_mean_square is no mean over the samples.*PerTarget.*OverBatch"
    ):
        verified(criterion=root_mean_square, steps=3)


class Unrepeatable(nn.Module):
    """Noise from a generator that the operating system seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(np.random.default_rng().normal())


def test_a_training_that_cannot_be_repeated() -> None:
    model = Unrepeatable()
    row = only(
        verified(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), workers=1, steps=3
        )
    )
    assert row.verdict == "DIFFERS"
    assert [
        text
        for text in row.causes
        if text.startswith("not repeatable: one process that simply trains again differs too")
    ]


class HalvesGradients(DDP):
    """Changes gradients after the exchange, on all ranks alike."""

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        bound = super().bind(model, optimizer, world, *options)
        complete = bound.exchange.complete

        def halve(idle: bool, failed: bool) -> None:
            complete(idle, failed)
            with torch.no_grad():
                model[2].bias.grad.mul_(0.5)  # type: ignore[index]

        bound.exchange.complete = halve  # type: ignore[method-assign]
        return bound


def test_what_no_experiment_explains_is_said_to_be_so() -> None:
    row = only(verified(strategies=HalvesGradients(), steps=3))
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "gradient of 2.bias")
    assert row.difference == pytest.approx(0.5)
    (cause,) = row.causes
    assert cause.startswith(
        "no cause could be confirmed; in that step it is in 1 of 4 parameters: 2.bias"
    )


class Rounds(DDP):
    """Exchanges gradients in 8 bits of mantissa, and says that it is not exact."""

    exact = False

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))
        return super().bind(model, optimizer, world, *options)


def test_a_strategy_that_says_it_is_lossy_is_measured_and_not_accused() -> None:
    report = verified(strategies=Rounds(), steps=5)
    row = only(report)
    assert (row.verdict, row.step, row.what) == ("lossy as declared", None, "all parameters")
    assert 1e-5 < row.difference < 1e-2
    assert report.ok


class UnregisteredLayers(nn.Module):
    """Keeps a layer in a plain list and a scale as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4)
        self.more = [nn.Linear(4, 4)]
        self.scale = torch.ones(4, requires_grad=True)
        self.unused = torch.ones(4, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more[0](self.first(x)) * self.scale


def test_tensors_that_are_no_parameters_and_parameters_that_are_not_trained() -> None:
    model = UnregisteredLayers()
    report = verified(
        model=model, optimizer=torch.optim.SGD([model.first.weight], lr=0.1), workers=1, steps=2
    )
    assert report.ok
    assert [note.partition(" (")[0] for note in report.notes[:1]] == [
        "the training cannot run in float64"
    ]  # a layer stays behind
    assert report.notes[1].startswith(
        "the loss depends on more[0].weight, more[0].bias, scale, which the model keeps in a plain"
    )
    assert report.notes[2].startswith(
        "the optimizer does not hold first.bias: it gets gradients and is never updated"
    )
