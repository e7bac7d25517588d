"""What an optimizer's step may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allhands import UserError
from allhands.step.update import check_one_gradient

WEIGHT = [torch.nn.Parameter(torch.zeros(2))]


class Twice(torch.optim.SGD):
    """Needs the loss twice, as SAM does."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS(WEIGHT), Twice(WEIGHT, lr=0.1)], ids=lambda o: type(o).__name__)
def test_an_optimizer_that_computes_the_loss_again_is_refused(optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(UserError, match=f"{type(optimizer).__name__} computes the loss several times.*torch.optim.AdamW"):
        check_one_gradient(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optional_closure_is_none_of_the_steps_business(kind: Any) -> None:
    check_one_gradient(kind(WEIGHT, lr=0.1))
