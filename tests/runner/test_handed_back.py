"""After a training by workers, the caller's objects are as one process would have left them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, LocalSGD, SupervisedRunner
from allhands.strategies import Strategy

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


class Changes(Callback):
    """Changes what is trained, as a user's callback may."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen
        self.ranks: list[Any] = []

    def on_epoch_start(self, training: Any) -> None:
        if training.epoch == 1:
            training.optimizer.add_param_group(
                {"params": list(training.model[0].parameters()), "lr": 0.01}
            )
            prune.l1_unstructured(training.model[1], "weight", 0.5)

    def on_epoch_end(self, training: Any) -> None:
        self.seen.append(training.step)
        self.ranks = training.gather(
            {"rank": training.world.rank, "value": torch.full((training.world.rank + 1,), 2.0)}
        )
        self.lock = threading.Lock()


def trained(**how: Any) -> tuple[nn.Module, torch.optim.Optimizer, Changes, list[int]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.5)
    seen: list[int] = []
    callback = Changes(seen)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        num_epochs=3,
        callbacks=[callback],
        loaders={"train": DataLoader(data, batch_size=4 // (how.get("workers") or 1))},
        **how,
    )
    return model, optimizer, callback, seen


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=1)], ids=lambda strategy: strategy.name)
def test_a_model_that_a_callback_changed(
    strategy: Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    one, one_optimizer, _, _ = trained()
    two, two_optimizer, callback, seen = trained(distributed=strategy, workers=2)
    assert list(two.state_dict()) == list(one.state_dict())
    for name, value in one.state_dict().items():
        assert torch.allclose(two.state_dict()[name], value, atol=1e-6), name
    assert [len(group["params"]) for group in two_optimizer.param_groups] == [2, 2]
    assert {id(p) for group in two_optimizer.param_groups for p in group["params"]} == {
        id(p) for p in two.parameters()
    }
    assert len(two_optimizer.state) == len(one_optimizer.state)
    assert seen is callback.seen
    assert seen == [2, 4, 6]
    assert [(value["rank"], value["value"].tolist()) for value in callback.ranks] == [
        (0, [2.0]),
        (1, [2.0, 2.0]),
    ]
    assert "Changes lock, _thread.lock: cannot pickle" in capsys.readouterr().out
