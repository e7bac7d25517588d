"""Models that compute in bf16 with weights of fp32: the training of a loop by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from allhands import FSDP, Pipeline, SupervisedRunner, UserError
from allhands.models.transformer import GPT, NextToken
from tests.reference import global_batches, relative_difference

SAMPLES = 61  # uneven over any number of workers


def tokens() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    both = torch.randint(64, (SAMPLES, 17), generator=drawn)
    return TensorDataset(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def gpt() -> nn.Module:
    torch.manual_seed(3)
    return GPT(64, 16, 2, 2, 32)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, workers: int = 1, **options: Any) -> nn.Module:
    SupervisedRunner().train(
        model=model,
        optimizer=optimizer_of(model),
        workers=workers,
        **{
            "criterion": NextToken(),
            "loaders": {"train": DataLoader(tokens(), 12 // workers, shuffle=True)},
            "num_epochs": 3,
            "precision": "bf16-true",
            "distributed": "ddp" if workers > 1 else None,
        }
        | options,
    )
    return model


def by_hand(model: nn.Module, device: str = "cpu") -> nn.Module:
    """The criterion is under autocast: on a GPU PyTorch's cross entropy leaves the logarithms of
    probabilities in bf16 there."""
    model, data = model.to(device), [tensor.to(device) for tensor in tokens().tensors]
    optimizer = optimizer_of(model)
    for rows in itertools.islice(global_batches(SAMPLES, 12, seed=42), 18):
        optimizer.zero_grad()
        cast = {name: weight.bfloat16() for name, weight in model.named_parameters()}
        output = functional_call(model, cast, (data[0][rows],))
        assert output.dtype == torch.bfloat16
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = NextToken()(output, data[1][rows])
        loss.backward()
        optimizer.step()
    return model.cpu()


@pytest.mark.parametrize("workers", [1, 2])
def test_it_is_the_loop_by_hand(workers: int) -> None:
    """Gradients are rounded to bf16 in each worker, so that two of them are apart by that; biases,
    which begin at 0, the most."""
    expected = by_hand(gpt())
    model = train(gpt(), workers)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert "forward" not in vars(model)
    found = relative_difference(model.state_dict(), expected.state_dict())
    assert found < (1e-6 if workers == 1 else 0.05), found


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return self.layers(x + self.shift)


def rows() -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(40, 6, generator=drawn), torch.randint(3, (40,), generator=drawn)
    )
    loaders = {"train": DataLoader(data, 8), "valid": DataLoader(data, 8)}
    return {"criterion": nn.CrossEntropyLoss(), "loaders": loaders}


def test_running_statistics_keep_their_digits() -> None:
    model = Norms()
    train(model, **rows())
    statistics = model.layers[1].running_var
    assert statistics.dtype == torch.float32
    assert not torch.equal(statistics, statistics.bfloat16().float())


class Counts(Norms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift.mul_(0.9)
        return self.layers(x + self.shift)


class Replaces(Norms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift = self.shift * 0.9
        return self.layers(x + self.shift)


@pytest.mark.parametrize("kind", [Counts, Replaces])
def test_a_buffer_that_changes_is_not_lost(kind: type[nn.Module]) -> None:
    with pytest.raises(UserError, match=r"changes its buffer 'shift'.*write precision='bf16'"):
        train(kind(), **rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed": FSDP(), "workers": 2}, r"write FSDP\(param_dtype='bf16'\)"),
        ({"distributed": Pipeline(), "workers": 2}, "write precision='bf16'"),
        ({"activation_checkpointing": True}, "computes layers again after it"),
    ],
)
def test_what_it_is_not_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(gpt(), **options)


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    expected = by_hand(gpt(), "cuda")
    for step, bound in (("eager", 1e-6), ("graph", 1e-6), ("compile", 0.05)):
        model = train(gpt(), step=step)
        assert ("step: captured in a CUDA graph" in capsys.readouterr().out) == (step != "eager")
        found = relative_difference(model.state_dict(), expected.state_dict())
        assert found < bound, (step, found)
