"""What is asked of the launcher for a training."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allhands import SupervisedRunner
from allhands.loop import workers


class Asked(Exception):
    """Raised in place of a start, with the modules that were asked for."""


def test_what_is_slow_to_import_and_here_already_is_imported_once_for_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_, preload, **more):
        raise Asked(*preload)

    def asked() -> tuple[str, ...]:
        with pytest.raises(Asked) as raised:
            SupervisedRunner(device="cpu").train(
                model=model,
                criterion=nn.MSELoss(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                datasets={
                    "batch_size": 2,
                    "train": TensorDataset(torch.ones(4, 2), torch.ones(4, 1)),
                },
                distributed=True,
                workers=2,
            )
        return raised.value.args

    model = nn.Linear(2, 1)
    monkeypatch.setattr(workers, "spawn", ask)
    monkeypatch.delitem(sys.modules, "torchmetrics", raising=False)
    assert asked() == ("torch._dynamo",)  # which the optimizer has imported
    monkeypatch.setitem(sys.modules, "torchmetrics", torch)
    assert asked() == ("torch._dynamo", "torchmetrics")
