"""`IRunner`, whose methods give what it trains with, beside a `Runner` that is given the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import UserError
from allhands.catalyst import dl, metrics


def loaders() -> dict[str, DataLoader]:
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    return {
        "train": DataLoader(TensorDataset(x, x), batch_size=8),
        "valid": DataLoader(TensorDataset(x[:20], x[:20]), batch_size=8),
    }


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))


class Codes(dl.IRunner):
    """Learns to give its input, and measures that by hand."""

    def __init__(self, logdir: str, engine: Any) -> None:
        super().__init__()
        self._folder, self._chosen = logdir, engine

    @property
    def num_epochs(self) -> int:
        return 2

    def get_engine(self):
        return self._chosen

    def get_loggers(self):
        return {
            "console": dl.ConsoleLogger(),
            "csv": dl.CSVLogger(logdir=self._folder),
            "tensorboard": dl.TensorboardLogger(logdir=self._folder),
        }

    def get_loaders(self):
        return loaders()

    def get_model(self):
        return self.model if self.model is not None else network()

    def get_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.02)

    def get_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def get_callbacks(self):
        return {
            "backward": dl.BackwardCallback(metric_key="loss"),
            "optimizer": dl.OptimizerCallback(metric_key="loss"),
            "scheduler": dl.SchedulerCallback(),
            "checkpoint": dl.CheckpointCallback(
                self._folder, loader_key="valid", metric_key="loss", minimize=True, topk=2
            ),
        }

    def on_loader_start(self, runner):
        super().on_loader_start(runner)
        self.meter = metrics.AdditiveMetric(compute_on_call=False)

    def handle_batch(self, batch):
        x, _ = batch
        loss = nn.functional.mse_loss(self.model(x), x)
        self.batch_metrics = {"loss": loss}
        self.meter.update(loss.item(), self.batch_size)

    def on_loader_end(self, runner):
        self.loader_metrics["by_hand"] = self.meter.compute()[0]
        super().on_loader_end(runner)

    def predict_batch(self, batch):
        return self.model(batch[0].to(self.engine.device))


class Given(dl.Runner):
    """The same step, without methods that give anything."""

    def handle_batch(self, batch):
        x, _ = batch
        self.batch_metrics = {"loss": nn.functional.mse_loss(self.model(x), x)}


def test_it_trains_as_a_runner_that_is_given_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    runner = Codes(str(folder), dl.CPUEngine())
    history = runner.run()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    same = Given(device="cpu").train(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        loaders=loaders(),
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")],
        num_epochs=2,
        logdir=None,
    )
    assert history["valid"]["loss"] == same["valid"]["loss"]
    assert history["lr"] == [0.02, 0.01]
    assert history["valid"]["by_hand"] == pytest.approx(history["valid"]["loss"], rel=1e-6)
    assert (folder / "checkpoints" / "best-2").exists()
    assert len((folder / "valid.csv").read_text().splitlines()) == 3
    (predicted,) = runner.predict_loader(loader=[(torch.ones(2, 6), None)])
    assert predicted.shape == (2, 6)


class Empty(dl.IRunner):
    def handle_batch(self, batch):
        pass


class NoModel(Empty):
    def get_loaders(self):
        return loaders()


class Older(NoModel):
    def get_datasets(self):
        return {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoModel, r"NoModel has no model; write def get_model\(self\)"),
        (Older, r"Older.get_datasets would never be called; write get_loaders\(self\)"),
    ],
)
def test_a_method_that_is_missing_or_never_called_is_named(kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind().run()


def test_data_that_are_missing_are_named() -> None:
    runner = Empty()
    runner.model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"Empty has no data; write def get_loaders\(self\)"):
        runner.run()


class Plain(dl.Runner):
    def handle_batch(self, batch):
        pass

    def get_model(self):
        return network()


def test_a_runner_without_run_still_refuses_such_methods() -> None:
    with pytest.raises(UserError, match=r"train\(model=…\)"):
        Plain(device="cpu").train(loaders=loaders(), model=network())
