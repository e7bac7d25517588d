"""Programs like those that come with COALA: each trains, or names what to write instead."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allhands
import allhands.federated as coala
from allhands.data import catalogue
from allhands.errors import UserError
from allhands.federated.coala import api


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_DATA", str(tmp_path))
    yield
    api.unregister()
    api._joined = None
    allhands.finalize()


@pytest.fixture
def cifar10(monkeypatch):
    """CIFAR-10 with 100 pictures of noise, and 20 to test on."""

    def load(name: str, split: str, root: str | None) -> torch.utils.data.TensorDataset:
        assert name == "cifar10"
        number = 100 if split == "train" else 20
        drawn = torch.Generator().manual_seed(number)
        pictures = torch.randn(number, 3, 32, 32, generator=drawn)
        return torch.utils.data.TensorDataset(pictures, torch.arange(number) % 10)

    monkeypatch.setattr(catalogue, "load", load)


SMALL: dict[str, Any] = {
    "server": {"rounds": 2, "clients_per_round": 2},
    "client": {"local_epoch": 1},
}


def test_cifar10_with_a_test_in_the_server(cifar10, capsys):
    coala.init(
        {
            "data": {"dataset": "cifar10", "num_of_clients": 10},
            "model": "simple_cnn",
            "test_mode": "test_in_server",
            **SMALL,
        }
    )
    assert len(coala.run().history["test"]["accuracy"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["round 1/2", "round 2/2"]


def test_shakespeare_with_a_test_in_the_clients(tmp_path: Path):
    drawn = np.random.default_rng(0)
    np.savez(
        tmp_path / "shakespeare_speakers.npz",
        tokens=drawn.integers(0, 65, 900, dtype=np.uint8),
        start=np.arange(0, 901, 300),
        names=np.array(["first", "second", "third"]),
    )
    coala.init(
        {
            "data": {"dataset": "shakespeare", "num_of_clients": 3},
            "model": "rnn",
            "test_mode": "test_in_client",
            **SMALL,
        }
    )
    assert len(coala.run().history["test"]["accuracy"]) == 2


def test_a_server_that_shows_its_figures_elsewhere(cifar10, monkeypatch):
    shown: list[dict[str, float]] = []
    wandb = types.SimpleNamespace(init=lambda project: None, log=shown.append, config={})
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class Shows(coala.BaseServer):
        def __init__(self, conf, **kwargs):
            super().__init__(conf, **kwargs)

        def init_visualization(self):
            wandb.init(project=self.conf.task_id)
            wandb.config = {"clients": self.conf.data.num_of_clients}

        def tracking_visualization(self, results):
            wandb.log(results)

    coala.register_server(Shows)
    coala.init(
        {
            "task_id": "pictures",
            "data": {"dataset": "cifar10", "num_of_clients": 10},
            "model": "simple_cnn",
            "test_mode": "test_in_server",
            "server": {"visualize": True, "rounds": 2, "clients_per_round": 2},
            "client": {"local_epoch": 1},
        }
    )
    coala.run()
    assert wandb.config == {"clients": 10}
    assert [sorted(figures) for figures in shown] == [["accuracy", "loss"]] * 2


class Folder(torch.utils.data.Dataset):
    """Pictures of a folder, read one by one."""

    def __init__(self) -> None:
        self.x = torch.randn(60, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], index % 3


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(48, 3))


def test_a_registered_data_set_that_is_read_picture_by_picture():
    coala.register_model(Net)
    coala.register_dataset(Folder(), Folder())
    coala.init({"data": {"num_of_clients": 6}, **SMALL})
    assert len(coala.run().history["test"]["accuracy"]) == 2


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("start_server", "allhands federated server"),
        ("start_client", "allhands federated site"),
        ("start_remote_server", "allhands federated server"),
        ("start_remote_client", "allhands federated site"),
        ("FederatedImageDataset", "torchvision.datasets.ImageFolder"),
        ("BaseModel", "torch.nn.Module"),
    ],
)
def test_names_that_are_not_here_say_what_to_write(name: str, instead: str):
    with pytest.raises(UserError, match=instead):
        getattr(coala, name)
    with pytest.raises(UserError, match=instead):
        exec(f"from allhands.federated import {name}")


def test_a_remote_training_is_refused_with_what_to_start():
    with pytest.raises(UserError, match=r"is_remote.*allhands federated server"):
        coala.init({"is_remote": True})


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'starts'"):
        coala.starts  # noqa: B018
