"""Optimizers from elsewhere on the parts of parameters that a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, SupervisedRunner, UserError
from allhands.strategies.repoint import check_optimizer
from tests.conformance.optimizers import Lookahead, ScheduleFree
from tests.conformance.table import difference
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(240)]

BATCH, SAMPLES = 8, 20
STRATEGIES: dict[str, Any] = {"fsdp": "fsdp", "sharded": DDP(optimizer_state="sharded")}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def lookahead(model: nn.Module) -> Any:
    return Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def schedule_free(model: nn.Module) -> Any:
    return ScheduleFree(model.parameters())


def twice(make: Any, strategy: Any) -> tuple[Any, list[float]]:
    """Two trainings of the same objects, one after another: the second goes on with the state of
    the first."""
    model = network()
    optimizer, losses = make(model), []
    loaders = {
        "train": DataLoader(samples(), BATCH // 2),
        "valid": DataLoader(samples(), BATCH // 2),
    }
    for _ in range(2):
        history = SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=optimizer,
            loaders=loaders,
            num_epochs=1,
            distributed=strategy,
        )
        losses.append(history["valid"]["loss"][-1])
    return model.state_dict(), losses


def by_hand(make: Any) -> tuple[Any, list[float]]:
    model = network()
    optimizer, losses = make(model), []
    x, y = samples().tensors
    for _ in range(2):
        if hasattr(optimizer, "train"):
            optimizer.train()
        for first in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(
                model(x[first : first + BATCH]), y[first : first + BATCH]
            ).backward()
            optimizer.step()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        losses.append(nn.functional.mse_loss(model(x), y).item())
    return model.state_dict(), losses


def all_of_them() -> dict[tuple[str, str], Any]:
    makers = {"lookahead": lookahead, "schedule-free": schedule_free}
    return {
        (kind, name): twice(make, given)
        for kind, make in makers.items()
        for name, given in STRATEGIES.items()
    }


def test_what_an_optimizer_keeps_goes_on_in_a_second_training() -> None:
    """Lookahead's momentum lies in the optimizer that it holds; evaluation sees the weights that a
    mode makes, on all ranks."""
    right = {"lookahead": by_hand(lookahead), "schedule-free": by_hand(schedule_free)}
    for found in in_world(2, all_of_them):
        for (kind, name), (weights, losses) in found.items():
            assert difference(weights, right[kind][0]) < 1e-5, (kind, name)
            assert losses == pytest.approx(right[kind][1], rel=1e-5), (kind, name)


class Own(torch.optim.SGD):
    elementwise = True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


class Apart(Lookahead):
    """The optimizer that it holds has groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups = [dict(group) for group in inner.param_groups]


def test_what_a_rank_with_parts_would_not_see_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"Own has a state_dict\(\) of its own.*write distributed='ddp'"
    ):
        check_optimizer(Own(network().parameters(), lr=0.1), "fsdp")
    with pytest.raises(UserError, match=r"Apart holds a SGD that has groups.*Share them"):
        check_optimizer(Apart(torch.optim.SGD(network().parameters(), lr=0.1)), "fsdp")
    with pytest.raises(
        UserError, match=r"write `elementwise = True` into the class Unsaid; or write DDP\(\)"
    ):
        SupervisedRunner(device="cpu").train(
            model=(model := network()),
            criterion=nn.MSELoss(),
            optimizer=Unsaid(model.parameters(), lr=0.1),
            loaders={"train": DataLoader(samples(), BATCH)},
            num_epochs=1,
            distributed=DDP(optimizer_state="sharded"),
            workers=2,
        )


class Unsaid(torch.optim.SGD):
    """Does not say that it is elementwise."""
