"""The learning rate at which a loss falls fastest, found on a copy of the model."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError, find_learning_rate
from allhands.runner.learning_rate_finder import LearningRates
from tests.worlds import in_world

BATCH, STEPS, START, END = 8, 60, 1e-4, 100.0


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": model[2].parameters(), "lr": 1.0},
        ]
    )
    return {"model": model, "optimizer": optimizer, "criterion": nn.MSELoss()}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def find(batch: int = BATCH, **options: Any) -> LearningRates:
    return find_learning_rate(
        **parts(),
        start=START,
        end=END,
        steps=STEPS,
        runner=SupervisedRunner(device="cpu"),
        loaders={"train": DataLoader(data(), batch)},
        **options,
    )


def by_hand() -> tuple[list[float], list[float]]:
    given = parts()
    model, optimizer = given["model"], given["optimizer"]
    rates, losses, smooth, step = [], [], 0.0, 0
    while True:
        for x, y in DataLoader(data(), BATCH):
            rate = START * (END / START) ** (step / (STEPS - 1))
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, 2 * rate
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            smooth = 0.9 * smooth + 0.1 * loss.item()
            rates.append(rate)
            losses.append(smooth / (1 - 0.9**step))
            if losses[-1] > 4 * min(losses) or step == STEPS:
                return rates, losses


def test_it_is_the_loop_by_hand_and_leaves_the_model_alone() -> None:
    rates, losses = by_hand()
    assert len(rates) < STEPS  # it diverges
    found = find()
    assert found.rates == pytest.approx(rates, rel=1e-6)
    assert found.losses == pytest.approx(losses, rel=1e-4)
    falls = [after - before for before, after in itertools.pairwise(losses)]
    assert found.suggestion == pytest.approx(rates[falls.index(min(falls))])
    given = parts()
    before = copy.deepcopy(given["model"].state_dict())
    find_learning_rate(
        **given, steps=10, runner=SupervisedRunner(device="cpu"), datasets={"train": data()}
    )
    assert all(torch.equal(before[k], v) for k, v in given["model"].state_dict().items())
    assert [group["lr"] for group in given["optimizer"].param_groups] == [0.5, 1.0]


def on_workers() -> dict[str, Any]:
    return vars(find(BATCH // 2))


def test_on_workers_it_is_the_same() -> None:
    rates, losses = by_hand()
    for found in in_world(2, on_workers):
        assert found["rates"] == pytest.approx(rates, rel=1e-6)
        assert found["losses"] == pytest.approx(losses, rel=1e-3)


def test_what_cannot_be_is_refused() -> None:
    arguments: dict[str, Any]
    for arguments, message in (
        ({"start": 1.0, "end": 0.1}, "end is larger"),
        ({"steps": 3}, "steps=3"),
        ({"start": 1e30, "end": 1e38, "steps": 10}, "Write a smaller end"),
    ):
        with pytest.raises(UserError, match=message):
            find_learning_rate(
                **parts(),
                runner=SupervisedRunner(device="cpu"),
                loaders={"train": DataLoader(data(), BATCH)},
                **arguments,
            )


def test_the_picture_marks_the_suggestion(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = LearningRates([1e-4, 1e-3, 1e-2, 1e-1], [2.0, 1.9, 1.0, 3.0], 1e-3)
    figure = found.plot(tmp_path / "rates.png")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    marked = next(line for line in axes.lines if line.get_marker() == "o")
    assert [*marked.get_xdata(), *marked.get_ydata()] == [1e-3, 1.9]
    assert marked.get_label() == "suggestion 0.001"
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
