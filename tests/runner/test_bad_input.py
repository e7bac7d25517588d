"""Every mistake ends in one message that names what was passed and what to write, and loses no
earlier checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, Callback, SupervisedRunner, UserError
from tests.runner.problems import arguments, classification, classifier


def train(**changes: Any) -> Any:
    return SupervisedRunner(device="cpu").train(**arguments(**changes))


def other_models_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(classifier().parameters(), lr=0.1)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "model class": (
        {"model": nn.Linear, "optimizer": other_models_optimizer()},
        "model is a type; pass a torch.nn.Module",
    ),
    "wrapped model": (
        {"model": nn.DataParallel(nn.Linear(1, 1)), "optimizer": other_models_optimizer()},
        "wrapped in DataParallel already; pass the bare model",
    ),
    "no criterion": ({"criterion": None}, "criterion is None; pass a loss such as"),
    "vector criterion": (
        {"criterion": nn.CrossEntropyLoss(reduction="none")},
        "one loss an element; write reduction='mean'",
    ),
    "vector function": (
        {"criterion": lambda o, t: (o.sum(1) - t) ** 2},
        r"returned shape \[8\].*\.mean\(\)",
    ),
    "broadcast": ({"criterion": nn.MSELoss()}, r"shape \[8, 4\] and the target \[8\]"),
    "no optimizer": ({"optimizer": None}, "optimizer is None; pass a torch.optim optimizer"),
    "strange optimizer": (
        {"optimizer": other_models_optimizer()},
        r"4 parameter\(s\) that the model does not have",
    ),
    "scheduler": ({"scheduler": 3}, r"scheduler is a int without a step\(\) method"),
    "period": ({"scheduler": (object(), "batch")}, "period must be 'step' or 'epoch'"),
    "no data": ({"loaders": None}, "either loaders= or datasets=; neither"),
    "both": ({"datasets": {"train": classification()}}, "either loaders= or datasets=; both"),
    "generator": (
        {"loaders": {"train": iter([1])}},
        "cannot be dealt out to workers; pass a torch.utils.data.DataLoader",
    ),
    "loader out of order": (
        {"loaders": {"train": DataLoader(classification(), 8, in_order=False)}},
        "in_order=False, by which batches come in the order in which they are ready",
    ),
    "callback class": (
        {"callbacks": [Callback]},
        r"callbacks holds the class Callback; write Callback\(…\)",
    ),
    "no train": (
        {"loaders": {"valid": DataLoader(classification(), 8)}},
        "no loader's name begins with 'train'; given are: valid",
    ),
    "valid loader": (
        {"valid_loader": "test"},
        "valid_loader='test' is not among the loaders; given are: train, valid",
    ),
    "main metric": (
        {"main_metric": "auc"},
        "main_metric='auc' is not measured; measured are: loss, accuracy",
    ),
    "repeated metric": ({"metrics": ["accuracy", "accuracy"]}, "two metrics are named 'accuracy'"),
    "callback": ({"callbacks": [print]}, "must be an allhands.Callback"),
    "epochs": ({"num_epochs": 0}, "num_epochs=0; it must be a whole number of at least 1"),
    "accumulate": ({"accumulate": 1.5}, "accumulate=1.5"),
    "clip": ({"clip_norm": -1.0}, "clip_norm=-1.0; it must be a positive number"),
    "precision": (
        {"precision": "float16"},
        "precision='float16'; it must be one of 'fp32', 'bf16', 'bf16-true', 'fp8', 'fp16'",
    ),
    "auto without logdir": (
        {"resume": "auto"},
        "resume='auto' looks for a checkpoint in the logdir; pass logdir",
    ),
    "save_every": (
        {"save_every": 0, "logdir": "x"},
        "save_every=0; it must be a whole number of optimizer steps, at least 1",
    ),
    "save_minutes": (
        {"save_minutes": -1, "logdir": "x"},
        "save_minutes=-1; it must be a positive number of minutes",
    ),
    "save_every alone": (
        {"save_every": 5},
        "save_every=5 saves checkpoints, which need a folder; pass logdir=…",
    ),
    "save_minutes alone": (
        {"save_minutes": 0.5},
        "save_minutes=0.5 saves checkpoints, which need a folder",
    ),
    "strategy": ({"distributed": "dpd"}, "no strategy 'dpd'"),
    "strategy class": ({"distributed": DDP}, r"write distributed=DDP\(\)"),
    "workers alone": ({"workers": 2}, "workers=2 with distributed=False.*write distributed=True"),
    "workers zero": (
        {"workers": 0, "distributed": True},
        "workers=0; it must be a whole number of at least 1",
    ),
    "dp": ({"distributed": "dp"}, "needs GPUs"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str) -> None:
    changes, message = CASES[name]
    with pytest.raises(UserError, match=message):
        train(**changes)


def test_the_batch_size_of_a_loader_that_is_predicted() -> None:
    loader = DataLoader(classification(), 8)
    with pytest.raises(UserError, match=r"predict\(batch_size=4\) goes with dataset="):
        SupervisedRunner(classifier()).predict(loader=loader, batch_size=4)


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        UserError, match=r"workers=8, but this machine shows 2 GPUs.*write workers=2"
    ):
        SupervisedRunner().train(**arguments(distributed=True, workers=8))


def test_a_logdir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"logdir='.*file/logs' cannot be written: Not a directory"):
        train(logdir=tmp_path / "file" / "logs")


def test_resume_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no checkpoint at .*/nothing; to resume, write resume='auto'"
    ):
        train(resume=tmp_path / "nothing")


def test_resume_from_a_cut_checkpoint_names_the_file_and_keeps_the_others(tmp_path: Path) -> None:
    train(logdir=tmp_path, num_epochs=2)
    cut = tmp_path / "checkpoints" / "epoch-0002" / "state.pt"
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.raises(
        UserError, match=r"epoch-0002/state.pt has 200 bytes.*others there: epoch-0001"
    ):
        train(logdir=tmp_path, resume=tmp_path / "checkpoints" / "last", num_epochs=4)
    history = train(logdir=tmp_path, resume="auto", num_epochs=3)
    assert history["epoch"] == [1, 2, 3]


def test_resume_from_another_model(tmp_path: Path) -> None:
    train(logdir=tmp_path, num_epochs=1)
    with pytest.raises(UserError, match="of another model or optimizer"):
        train(model=nn.Linear(5, 4), resume=tmp_path, num_epochs=2)


def poisoned(position: int) -> DataLoader:  # type: ignore[type-arg]
    x, y = classification().tensors
    x = x.clone()
    x[position] = float("nan")
    return DataLoader(TensorDataset(x, y), 4)


def test_a_nan_loss_ends_the_training_before_it_reaches_the_weights(tmp_path: Path) -> None:
    given = arguments(logdir=tmp_path, num_epochs=2)
    SupervisedRunner(device="cpu").train(**given)
    before = {key: value.clone() for key, value in given["model"].state_dict().items()}
    with pytest.raises(UserError, match=r"training loss is nan \(epoch 3, batch 1\)"):
        SupervisedRunner(device="cpu").train(
            **{**given, "num_epochs": 3, "resume": "auto", "loaders": {"train": poisoned(0)}}
        )
    assert all(
        torch.equal(before[key], value) for key, value in given["model"].state_dict().items()
    )
    assert (
        json.loads((tmp_path / "checkpoints" / "last" / "manifest.json").read_text())["epoch"] == 2
    )


@pytest.mark.serial
def test_a_nan_loss_on_one_rank_names_the_rank(tmp_path: Path) -> None:
    train(logdir=tmp_path, num_epochs=2)
    with pytest.raises(UserError, match=r"training loss is nan on rank 1 \(epoch 3, batch 1\)"):
        train(
            logdir=tmp_path,
            num_epochs=3,
            resume="auto",
            loaders={"train": poisoned(5)},
            distributed=True,
            workers=2,
        )
    assert (
        json.loads((tmp_path / "checkpoints" / "last" / "manifest.json").read_text())["epoch"] == 2
    )


class LastLonger(Callback):
    """Loses its picture of the run when it is resumed with other callbacks."""


def test_resume_with_other_callbacks(tmp_path: Path) -> None:
    train(logdir=tmp_path, num_epochs=1)
    with pytest.raises(UserError, match=r"written with 0 callback\(s\) and this run has 1"):
        train(logdir=tmp_path, num_epochs=2, resume="auto", callbacks=[LastLonger()])
