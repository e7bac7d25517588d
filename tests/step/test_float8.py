"""Linear layers that multiply in float8: the training of a loop by hand with torchao's layers. On
CPUs they are emulated, with the same rounding."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import allhands
from allhands import FSDP, Callback, LocalSGD, Pipeline, SupervisedRunner, UserError
from allhands.models.transformer import NextToken
from allhands.step import float8
from allhands.step.precision import Precision
from tests.reference import drift
from tests.step.test_cast_weights import by_hand as cast_by_hand
from tests.step.test_cast_weights import gpt, optimizer_of, tokens
from tests.step.test_cast_weights import train as train_cast


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(float8.EMULATION, "1")


def train(model: nn.Module, workers: int = 1, **options: Any) -> nn.Module:
    return train_cast(model, workers, **{"precision": "fp8"} | options)


def by_hand(device: str = "cpu") -> nn.Module:
    model = gpt()
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        model, config=dataclasses.replace(config, pad_inner_dim=True, emulate=device == "cpu")
    )
    return cast_by_hand(model, device)


@pytest.mark.parametrize("workers", [1, 2])
def test_it_is_the_loop_by_hand(workers: int, emulated: None) -> None:
    """Sums over samples are rounded by scales of the samples of a worker, so that two are apart by
    that."""
    assert drift(train(gpt(), workers), by_hand(), gpt()) < (1e-5 if workers == 1 else 0.1)


def test_it_rounds_more_than_bf16(emulated: None) -> None:
    assert 0.05 < drift(train(gpt()), train_cast(gpt()), gpt()) < 0.4


def test_with_local_steps(emulated: None) -> None:
    model = train(gpt(), 2, distributed=LocalSGD(every=2))
    assert not converted(model)
    assert 0 < drift(model, by_hand(), gpt()) < 0.5  # it has other steps


def converted(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, Float8Linear)]


class Watch(Callback):
    """Looks at the model within the training, and may end it by an error."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks, self.seen = breaks, set()

    def on_step_end(self, training: Any) -> None:
        self.seen = set(converted(training.model))
        if self.breaks:
            raise ZeroDivisionError


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_has_its_own_layers_again(breaks: bool, emulated: None) -> None:
    model, calls = gpt(), []
    before = {name: (one, type(one)) for name, one in model.named_modules()}
    names = list(model.state_dict())
    handle = model.layers[0].mlp.up.register_forward_hook(lambda *given: calls.append(1))
    watch = Watch(breaks)
    if breaks:
        with pytest.raises(ZeroDivisionError):
            train(model, callbacks=[watch])
    else:
        train(model, callbacks=[watch])
    assert watch.seen == {
        "head",
        *(
            f"layers.{number}.{name}"
            for number in range(2)
            for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
        ),
    }
    assert {name: (one, type(one)) for name, one in model.named_modules()} == before
    assert list(model.state_dict()) == names
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert "forward" not in vars(model)
    trained = len(calls)
    assert trained == (1 if breaks else 18)
    handle.remove()
    model(tokens().tensors[0][:2])
    assert len(calls) == trained


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def rows() -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(40, 6, generator=drawn), torch.randint(3, (40,), generator=drawn)
    )
    return {"criterion": nn.CrossEntropyLoss(), "loaders": {"train": DataLoader(data, 7)}}


def test_a_line_says_how_many_layers(emulated: None, capsys: pytest.CaptureFixture[str]) -> None:
    """And batches need not be multiples of 16."""
    train(Odd(), **rows())
    line = "precision: 1 of 3 linear layers multiply in fp8, all else is in bf16"
    assert capsys.readouterr().out.count(line) == 1


def test_a_model_without_such_layers_is_refused(emulated: None) -> None:
    with pytest.raises(UserError, match="Linear has none; write precision='bf16-true'"):
        train(nn.Linear(6, 3), **rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed": FSDP(), "workers": 2}, r"precision='fp8' .*FSDP\(param_dtype='bf16'\)"),
        ({"distributed": Pipeline(), "workers": 2}, "precision='fp8' .*write precision='bf16'"),
        ({"activation_checkpointing": True}, "precision='fp8' .*computes layers again after it"),
        ({}, "capability 8.9 or more, and this training is on 'cpu'; write precision='bf16-true'"),
    ],
)
def test_what_it_is_not_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(gpt(), **options)


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match="8.9 or more, and NVIDIA A100 has 8.0; write"):
        Precision("fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Precision("fp8", torch.device("cuda")).casts


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        float8, "find_spec", lambda name: None if name == "torchao" else find_spec(name)
    )
    with pytest.raises(UserError, match=r"pip install 'allhands\[fp8\]'"):
        train(gpt())


def test_a_plan_refuses_it() -> None:
    model = gpt()
    with pytest.raises(UserError, match="knows no times .*write precision='bf16-true'"):
        allhands.plan(
            model=model,
            criterion=NextToken(),
            optimizer=optimizer_of(model),
            batch=tuple(tensor[:4] for tensor in tokens().tensors),
            gpus=2,
            precision="fp8",
        )


def test_evaluation_alone_multiplies_so_too(emulated: None) -> None:
    losses = {
        precision: SupervisedRunner().evaluate(
            model=gpt(),
            criterion=NextToken(),
            loaders={"valid": DataLoader(tokens(), 12)},
            precision=precision,
        )["valid"]["loss"]
        for precision in ("fp32", "bf16", "bf16-true", "fp8")
    }
    assert len(set(losses.values())) == 4
    assert all(value == pytest.approx(losses["fp32"], rel=0.01) for value in losses.values())


# rare: on processors these layers are emulated, which nobody compiles; it takes more than a minute.
@pytest.mark.rare
def test_compiled_steps_are_those_of_eager_ones(
    emulated: None, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(gpt())
    model = train(gpt(), step="compile")
    assert "compiled" in capsys.readouterr().out
    assert not converted(model)
    assert drift(model, expected, gpt()) < 0.1


def test_two_workers_are_one_process_to_verify(emulated: None) -> None:
    model = gpt()
    report = allhands.verify(
        model=model,
        criterion=NextToken(),
        optimizer=optimizer_of(model),
        loaders={"train": DataLoader(tokens(), 6)},
        precision="fp8",
        strategies=["ddp"],
        workers=[1, 2],
        steps=4,
    )
    assert report.ok, report
    assert [row.verdict for row in report.rows] == ["same", "same"]


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products in float8")
    expected = by_hand("cuda")
    for step, bound in (("eager", 1e-5), ("graph", 1e-5), ("compile", 0.3)):
        model = train(gpt(), step=step)
        assert ("step: captured in a CUDA graph" in capsys.readouterr().out) == (step != "eager")
        found = drift(model, expected, gpt())
        assert found < bound, (step, found)
