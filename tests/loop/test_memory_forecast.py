"""What a step takes of a GPU's memory is planned beside the training, and measured."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import DDP, SupervisedRunner
from allhands.loop import memory_forecast
from allhands.loop.memory_forecast import MEASURED_AFTER, MemoryForecast
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data, LoopSettings
from allhands.loop.task import Task
from allhands.strategies import Single
from allhands.world import World

MIB = 2**20
# What the GPU holds before the first step beside the training, and what steps take of it.
BESIDE, TAKEN, RESERVED = 100 * MIB, 700 * MIB, 900 * MIB


class Lines(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def model_of(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Case:
    """A training of one of several workers on a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module, rank: int = 0) -> None:
        device = torch.device("cuda", 0)
        world = World(rank, rank, 0, 2, 2, device, "nccl", "test")
        weights = sum(one.nbytes for one in model.parameters())
        self.batch = ([(torch.zeros(64, 512), torch.zeros(64, 512))], [64], 128, False)
        batch = sum(one.nbytes for one in self.batch[0][0])
        cuda = {
            # weights, the buckets of their gradients, a batch, and what is no part of a step
            "memory_allocated": 2 * weights + batch + BESIDE,
            "max_memory_allocated": TAKEN,
            "max_memory_reserved": RESERVED,
            "get_device_capability": (8, 0),
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
        self.settings = LoopSettings(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            data=Data(optional=True),
            strategy=DDP(),
        )
        runner = SupervisedRunner()
        task = Task(None, nn.MSELoss(), runner.rows_of, runner=runner)
        self.reporter = Lines()
        self.forecast = MemoryForecast(self.settings, world, self.reporter, task)

    def take_steps(self, count: int) -> None:
        group: Any = SimpleNamespace(optimizer=self.settings.optimizer, captured=None)
        for _ in range(count):
            self.forecast.look(group, self.batch)

    def wait(self) -> None:
        """Until the plan is there."""
        ends = time.monotonic() + 240
        while self.forecast._process is not None and self.forecast._process.runs:
            assert time.monotonic() < ends
            time.sleep(0.05)


def test_a_line_says_what_is_planned_and_another_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    case = Case(monkeypatch, model)
    case.take_steps(3)
    case.wait()
    case.take_steps(1)
    (planned,) = case.reporter.lines
    batch = torch.zeros(64, 512)
    (row,) = (
        row
        for row in allhands.plan(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.AdamW(model.parameters()),
            batch=(batch, batch),
            gpus=2,
            card="a100",
            step="eager",
        ).rows
        if row.name == "ddp"
    )
    expected = row.peak - row.memory["CUDA and NCCL"] + BESIDE
    said = float(planned.partition("memory: ")[2].partition(" MiB")[0])
    assert said == pytest.approx(expected / MIB, abs=1)
    assert "of tensors on the GPU of rank 0 as planned" in planned
    assert "data and others 100 MiB" in planned

    case.take_steps(MEASURED_AFTER)
    assert case.reporter.lines[1:] == [
        f"memory: 700 MiB measured in {MEASURED_AFTER} steps, planned were {said:.0f} MiB; "
        "PyTorch's allocator holds 900 MiB"
    ]
    assert not case.forecast.goes_on


class NotPlanned(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            raise ValueError("no data")
        return super().forward(x)


def test_nothing_is_said_of_a_model_that_cannot_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, NotPlanned(512, 512))
    case.take_steps(1)
    assert case.forecast.goes_on
    case.wait()
    case.take_steps(2 * MEASURED_AFTER)
    assert case.reporter.lines == []
    assert not case.forecast.goes_on


def test_a_training_that_ends_before_the_plan_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, model_of())
    case.take_steps(1)
    process = case.forecast._process._process
    assert process.poll() is None
    case.forecast.close()
    assert process.poll() is not None
    assert case.reporter.lines == []


def test_other_ranks_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, model_of(), rank=1)
    assert not case.forecast.goes_on


def test_trainings_on_processors_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MemoryForecast] = []

    class Seen(MemoryForecast):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("allhands.loop.bound_loop.MemoryForecast", Seen)
    monkeypatch.setattr(memory_forecast, "public", None)  # which nobody calls
    model = nn.Linear(3, 1)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        datasets={"batch_size": 6, "train": TensorDataset(torch.ones(24, 3), torch.ones(24, 1))},
        distributed=Single(),
        num_epochs=1,
    )
    (forecast,) = made
    assert not forecast.goes_on
