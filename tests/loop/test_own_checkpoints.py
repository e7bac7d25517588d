"""Own loops that were stopped go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allhands
from tests.loop.own_loops import Left, d_loss, loaders, net, run, weights
from tests.worlds import in_world


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train_and_leave(folder: Path, leave_at: int | None) -> Any:
    g, d = net(4, 6), net(6, 1, seed=1)
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.Adam(g.parameters(), lr=0.01),
            "d": torch.optim.Adam(d.parameters(), lr=0.01),
        },
        loaders={"train": loaders(1)["train"]},
        logdir=folder,
        save_every=3,
        resume="auto",
    )
    counter = Counter()
    loop.register("counter", counter)
    loop.register("own", counter, each_rank=True)

    def of_d(batch: Any) -> torch.Tensor:
        return d_loss(loop.models["d"], batch[0], loop.models["g"](loop.randn(len(batch[0]), 4)))

    def of_g(batch: Any) -> torch.Tensor:
        z = torch.randn(len(batch[0]), 4)  # from the global generator
        return F.softplus(-loop.models["d"](loop.models["g"](z))).mean()

    for epoch in loop.epochs(3):
        for batch in epoch.train:
            loop.step(of_d, batch, optimizer="d")
            loop.step(of_g, batch, optimizer="g")
            counter.count += 1
            if counter.count == leave_at:
                raise Left
    return weights(g, d), counter.count, loop.history["train"]


@pytest.mark.parametrize("leave_at", [4, 5, 8])
def test_a_loop_goes_on_to_the_bit(tmp_path: Path, leave_at: int) -> None:
    expected, count, history = train_and_leave(tmp_path / "whole", None)
    with pytest.raises(Left):
        train_and_leave(tmp_path / "cut", leave_at)
    found, again, resumed = train_and_leave(tmp_path / "cut", None)
    assert all(map(torch.equal, found, expected))
    assert again == count
    assert resumed == history


def test_sigterm_saves_and_the_loop_goes_on(tmp_path: Path) -> None:
    def train(folder: Path, kill_at: int | None) -> list[torch.Tensor]:
        model = net()
        loop = allhands.Loop(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loaders=loaders(1),
            logdir=folder,
            resume="auto",
        )
        for epoch in loop.epochs(3):
            for batch in epoch.train:
                loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch)
                if loop.global_step == kill_at:
                    os.kill(os.getpid(), signal.SIGTERM)
        return weights(model)

    expected = train(tmp_path / "whole", None)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "cut", 7)
    assert left.value.code == 128 + signal.SIGTERM
    assert all(map(torch.equal, train(tmp_path / "cut", None), expected))


class Parts:
    """What a rank has of the parameters, as DTensors."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = [p.detach() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is not saved")


def save_parts(folder: Path, each_rank: bool) -> None:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy="fsdp",
        logdir=folder,
    )
    loop.register("parts", Parts(loop.model), each_rank=each_rank)
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch))


@pytest.mark.serial
@pytest.mark.parametrize("each_rank", [False, True])
def test_parts_of_tensors_are_not_saved_as_a_state(tmp_path: Path, each_rank: bool) -> None:
    with pytest.raises(allhands.UserError, match=r"is a DTensor, .* keep its to_local\(\)"):
        in_world(2, save_parts, tmp_path, each_rank)
