"""Looks at a model and an optimizer, without any run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from allhands.errors import UserError
from allhands.loop.settings import Data
from allhands.verify.probes import Probe, refuse_strangers, unregistered
from allhands.verify.runner_runs import RunnerRuns
from tests.verify.problems import arguments, data


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shown = nn.Linear(2, 2)
        self.again = [self.shown]  # is registered above
        self.blocks = {"one": [nn.Linear(2, 1, bias=False)]}
        self.scale = torch.ones(2, requires_grad=True)
        self.constant = torch.ones(2)
        self.inner = nn.Module()
        self.inner.kept = (nn.Parameter(torch.zeros(1)),)


def test_unregistered_tensors_are_found_by_path() -> None:
    names = [name for name, _ in unregistered(Hidden())]
    assert sorted(names) == ["blocks['one'][0].weight", "inner.kept[0]", "scale"]
    assert unregistered(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_an_optimizer_that_trains_an_unregistered_tensor_is_refused_by_its_name() -> None:
    model = Hidden()
    refuse_strangers(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        UserError,
        match=r"the optimizer holds scale, which the model keeps in a plain "
        r"attribute.*nn\.ModuleList",
    ):
        refuse_strangers(model, torch.optim.SGD([*model.parameters(), model.scale], lr=0.1))


def mixed(samples: Any) -> Any:
    x, y = default_collate(samples)
    return x[torch.randperm(len(x))], y


class Draws(Dataset[Any]):
    """Draws from the global generators, for each sample or for whole batches."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(5), index % 4


class DrawsBatches(Draws):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(data(), 4), ""),
        (DataLoader(Draws(), 4), ""),
        (
            DataLoader(DrawsBatches(), 4),
            "the data set of loader 'train' draws random numbers in __getitems__",
        ),
        (
            DataLoader(data(), 4, collate_fn=mixed),
            "the collate_fn of loader 'train' draws random numbers for a whole batch",
        ),
        (DataLoader(data(), 4, collate_fn=default_collate), ""),
    ],
)
def test_random_data_that_depends_on_the_number_of_workers(loader: Any, said: str) -> None:
    given = arguments()
    objects = {key: given[key] for key in ("model", "criterion", "optimizer", "runner")}
    runs = RunnerRuns(
        objects | {"data": Data({"train": loader}), "seed": 1, "precision": "fp32"}, "cpu"
    )
    try:
        found = Probe(runs.path).random_data
    finally:
        runs.close()
    assert found.startswith(said)
    assert bool(found) == bool(said)
