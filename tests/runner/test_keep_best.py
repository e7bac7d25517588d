"""More checkpoints than the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import KeepBest, SupervisedRunner, UserError
from allhands.catalyst import dl

# Of the epochs, and of the checkpoints that are then kept: the two newest, and the best three.
VALUES = (5.0, 2.0, 9.0, 1.0, 3.0, 8.0, float("nan"), 7.0)
KEPT = {
    1: {1},
    2: {1, 2},
    3: {1, 2, 3},
    4: {1, 2, 3, 4},
    5: {2, 4, 5},
    6: {2, 4, 5, 6},
    7: {2, 4, 5, 6, 7},
    8: {2, 4, 5, 7, 8},
}


class Given:
    """A metric whose value for targets of 0 is given, evaluation by evaluation."""

    def __init__(self, done: int) -> None:
        self.done = done

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> float:
        if target.any():
            return 0.0
        self.done += 1
        return VALUES[self.done - 1]


def objects(done: int = 0) -> dict[str, Any]:
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    return {
        "model": model,
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loaders": {
            "train": DataLoader(TensorDataset(x, torch.ones(4, 1)), 4),
            "valid": DataLoader(TensorDataset(x, torch.zeros(4, 1)), 4),
        },
        "metrics": {"given": Given(done)},
    }


def train(folder: Path, epochs: int, done: int = 0, **given: Any) -> dict[str, Any]:
    given = {"callbacks": [KeepBest(3)], **objects(done), **given}
    return SupervisedRunner(device="cpu").train(
        main_metric="given", num_epochs=epochs, logdir=folder, resume="auto", **given
    )


def epochs_in(folder: Path) -> set[int]:
    return {int(path.name[6:10]) for path in (folder / "checkpoints").glob("epoch-*")}


def test_the_best_three_are_kept_over_a_resume(tmp_path: Path) -> None:
    for epoch in range(1, len(VALUES) + 1):
        train(tmp_path, epoch, done=epoch - 1)
        assert epochs_in(tmp_path) == KEPT[epoch], epoch
    links = tmp_path / "checkpoints"
    targets = {name: (links / name).resolve().name for name in ("best", "best-2", "best-3")}
    assert targets == {"best": "epoch-0004", "best-2": "epoch-0002", "best-3": "epoch-0005"}


def test_the_best_evaluations_between_steps(tmp_path: Path) -> None:
    train(
        tmp_path,
        6,
        evaluate_every=2,
        callbacks=[KeepBest(2)],
        minimize_metric=False,
    )
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("epoch-*"))
    # Of 5, 2 and 9, after steps 2, 4 and 6.
    assert (tmp_path / "checkpoints" / "best-2").resolve().name == names[0]
    assert names[0].endswith("step-000000002")


def test_by_catalysts_name(tmp_path: Path) -> None:
    kept = dl.CheckpointCallback(str(tmp_path), "valid", "given", True, topk=3)
    dl.SupervisedRunner(device="cpu").train(**objects(), num_epochs=5, callbacks=[kept])
    assert epochs_in(tmp_path) == {2, 4, 5}


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(UserError, match=r"KeepBest\(count=…\)"):
        KeepBest(0)
