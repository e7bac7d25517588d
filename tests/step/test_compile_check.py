"""The losses and gradients of a step that is not taken, and how far two of them lie apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from allhands.step.compile_check import losses_and_gradients, relative_gaps
from tests.step.captured_steps import Trained, data, without_dropout


def test_passes_leave_nothing_behind() -> None:
    """Weights, statistics and what callbacks see of gradients are as before."""
    trained = Trained(without_dropout(), torch.optim.SGD, {"lr": 0.1}, captured=False)
    trained.steps(data(3))
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    gradients = [p.grad for p in trained.model.parameters()]
    batches, counts, total = step_of()
    take = trained.make()
    losses, *found = losses_and_gradients(take, [trained.model, None], batches, counts, total)
    assert len(trained.losses) == 3  # nobody was told
    assert all(torch.equal(before[k], v) for k, v in trained.model.state_dict().items())
    assert all(a is p.grad for a, p in zip(gradients, trained.model.parameters(), strict=True))
    # The step itself sees the same.
    take(batches, counts, total, False)
    assert losses.tolist() == pytest.approx(trained.losses[3:])  # sums over the samples
    torch.nn.utils.clip_grad_norm_(found_in := copies(found), 0.5)
    for own, p in zip(found_in, trained.model.parameters(), strict=True):
        assert torch.equal(own.grad, p.grad)


def copies(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    """Parameters that have these gradients."""
    made = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.clone()
    return made


def step_of() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int], int]:
    """Two micro-batches of four samples."""
    drawn = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(4, 6, generator=drawn), torch.randint(3, (4,), generator=drawn))
        for _ in range(2)
    ]
    return batches, [4, 4], 8


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = float(len(x))
        return self.inner(x)


def test_a_model_that_counts_its_calls_is_refused_and_has_its_count_again() -> None:
    trained = Trained(Counts(), torch.optim.SGD, {"lr": 0.1}, captured=False)
    with pytest.raises(ValueError, match="changes its attribute 'calls'"):
        losses_and_gradients(trained.make(), [trained.model, None], *step_of())
    assert trained.model.calls == 0
    assert not hasattr(trained.model, "last")


def test_rounded_weights_are_put_back() -> None:
    """They change the gradients by about as much as the format rounds."""
    trained = Trained(without_dropout(), torch.optim.SGD, {"lr": 0.1}, captured=False)
    take = trained.make()
    before = [p.detach().clone() for p in trained.model.parameters()]
    plain = losses_and_gradients(take, [trained.model, None], *step_of())
    rounded = losses_and_gradients(take, [trained.model, None], *step_of(), rounded=True)
    assert all(torch.equal(a, b) for a, b in zip(before, trained.model.parameters(), strict=True))
    gaps = relative_gaps(plain, rounded)
    assert all(1e-9 < gap < 1e-5 for gap in gaps.values()), gaps


def test_gaps_are_of_losses_and_of_gradients() -> None:
    losses, gradient = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    one = [losses, gradient]
    assert relative_gaps(one, one) == {"losses": 0.0, "gradients": 0.0}
    other = [losses + torch.tensor([0.0, 1.0]), 1.5 * gradient]
    assert relative_gaps(one, other) == pytest.approx({"losses": 0.2, "gradients": 0.5})
    assert set(relative_gaps(one, [losses]).values()) == {math.inf}
    assert math.isnan(relative_gaps(one, [losses, gradient * math.nan])["gradients"])
