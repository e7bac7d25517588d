"""What a criterion's first values show: a mean over the samples, a sum, or neither."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands.step.mean_check import MeanCheck


def found(criterion: Any, output: Any, target: Any) -> str | None:
    check = MeanCheck(criterion)
    check.look(output, target)
    return check.found


X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
IGNORED = torch.where(torch.arange(12) % 3 == 0, Y, -100)


class Teacher(nn.Module):
    """Has weights of its own, so that it takes inputs of their format alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, self.inner(output)).sqrt() * 0 + F.mse_loss(
            output, self.inner(output)
        )


def triplet(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    distance, same = torch.cdist(output, output), target[:, None] == target[None]
    return torch.relu((distance * same).amax(1) - (distance + 1e6 * same).amin(1) + 0.5).mean()


def elbo(output: Any, target: torch.Tensor) -> torch.Tensor:
    made, mu, log_variance = output
    return (
        F.mse_loss(made, target, reduction="sum")
        - 0.5 * (1 + log_variance - mu.square() - log_variance.exp()).sum()
    )


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (lambda o, t: 2 * F.mse_loss(o, t), X, X + 1),
        (lambda o, t: 2 * F.cross_entropy(o, t), X, Y),
        (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), X.bfloat16(), Y),
        (functools.partial(F.mse_loss, reduction="mean"), X, X * 1e-6),
        (lambda o, t: o.sum(1).mean(), X, None),
        (lambda o, t: F.mse_loss(o["a"], t["b"]) + o["a"].mean(), {"a": X}, {"b": X + 1}),
        (Teacher(), X, Y),
        (lambda o, t: 1e6 + o.mean(), X, Y),
    ],
)
def test_a_mean_over_samples_passes(criterion: Any, output: Any, target: Any) -> None:
    assert found(criterion, output, target) == ""


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (lambda o, t: 2 * F.cross_entropy(o, t), X, IGNORED),
        (lambda o, t: F.mse_loss(o, t).sqrt(), X, X + torch.arange(12)[:, None]),
        (triplet, X, Y),
        (lambda o, t: ((o - 1).square().sum(1) * t).sum() / t.sum(), X, torch.arange(12.0)),
        (lambda o, t: -F.log_softmax(o @ o.T, 1).diagonal().mean(), X.half(), None),
    ],
)
def test_what_is_neither_mean_nor_sum_is_named_with_three_ways_to_say_it(
    criterion: Any, output: Any, target: Any
) -> None:
    said = found(criterion, output, target)
    assert said is not None
    assert "no mean over the samples: on 12 samples" in said
    assert all(
        way in said for way in ("allhands.PerTarget(", "(sum, count)", "allhands.OverBatch(")
    )


def test_a_sum_is_told_from_a_mean() -> None:
    said = found(elbo, (X, X[:, :2], X[:, 2:4]), X + 1)
    assert said is not None
    assert "elbo is a sum over the samples" in said
    assert "Write elbo.reduction = 'sum'" in said


def test_a_loss_of_the_models_own_says_nothing_of_itself() -> None:
    said = found(lambda o, t: o["loss"], {"loss": torch.tensor(0.5), "logits": X}, Y)
    assert said is not None
    assert "allhands.ModelLoss()" in said


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


def test_dataclasses_are_cut() -> None:
    assert found(lambda o, t: F.cross_entropy(o.logits, t), Output(X, (X,)), Y) == ""
    assert found(lambda o, t: F.cross_entropy(o.logits, t), Output(X, (X,)), IGNORED)


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (lambda o, t: F.mse_loss(o, t).sqrt(), X, X[:7]),  # other lengths
        (lambda o, t: o[0].mean().sqrt(), [X.abs()] * 3, None),  # a list of samples, perhaps
        (lambda o, t: len(t) * o.mean(), X, ["name"] * 12),
        (lambda o, t: F.dropout(o).square().mean().sqrt(), X, Y),  # it draws
        (
            lambda o, t: torch.autograd.grad(o.square().sum(), o)[0].norm(),
            X.clone().requires_grad_(),
            Y,
        ),
    ],
)
def test_what_cannot_be_compared_is_not_accused(criterion: Any, output: Any, target: Any) -> None:
    check = MeanCheck(criterion)
    check.look(output, target)
    assert not check.found
    assert check.found is None


def test_micro_batches_of_one_sample_are_put_together() -> None:
    check = MeanCheck(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))
    output, target = (
        torch.randn(2, 6, 3),
        torch.tensor([[0, 1, 2, 0, 1, 2], [1, -100, -100, -100, -100, -100]]),
    )
    check.look(output[:1], target[:1])
    assert check.found is None
    assert check.waits
    check.look(output[1:], target[1:])
    assert check.found is not None
    assert "on 2 samples" in check.found


def test_nothing_remembers_that_it_was_looked_at() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(5))
            self.calls, self.seen = 0, [0.5]

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = (output - self.centre).square().mean()
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
            self.calls += 1
            self.seen.append(loss.item())
            random.random()
            torch.rand(1)
            self.latest = target
            return loss

    criterion, counted, target = Moving(), [], IGNORED.clone()
    before = torch.get_rng_state(), random.getstate()

    def call(output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        counted.append(len(given))
        given[given == -100] = 0
        return criterion(output, given)

    assert found(call, X, target) is not None
    assert (criterion.calls, criterion.seen, counted) == (0, [0.5], [])
    assert not criterion.centre.any()
    assert not hasattr(criterion, "latest")
    assert torch.equal(target, IGNORED)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
