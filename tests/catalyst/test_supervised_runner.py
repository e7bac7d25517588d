"""Supervised runners with hooks of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands.catalyst import dl
from tests.catalyst.small_training import (
    CLASSES,
    GLOBAL,
    SAMPLES,
    OfOneBatch,
    Trace,
    assert_same,
    batches,
    data,
    distributed,
    loaders,
    net,
    on_workers,
)


def test_a_batch_is_changed_before_a_supervised_runner_sees_it() -> None:
    model, plain = net(6, CLASSES, 1), net(6, CLASSES, 1)
    x, y, _ = data().tensors
    doubled = dl.BatchTransformCallback(lambda x: 2 * x, "on_batch_start", "features")
    dl.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, y), GLOBAL)},
        callbacks=[doubled],
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets, _ in batches():
        optimizer.zero_grad()
        F.cross_entropy(plain(2 * inputs), targets).backward()
        optimizer.step()
    assert_same(model, plain)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net(6, 3, 1), net(3, 6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        z = self.encoder(x)
        return z, self.decoder(z)


@on_workers
def test_a_supervised_runner_of_an_autoencoder(workers: int, preloaded: None) -> None:
    model, plain, trace = Encoder(), Encoder(), Trace()
    history = dl.SupervisedRunner(
        input_key="features",
        output_key=["embedding", "restored"],
        target_key="targets",
        loss_key="loss_ae",
        device="cpu",
    ).train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={
            "train": DataLoader(TensorDataset(data().tensors[0], data().tensors[0]), 8 // workers)
        },
        callbacks={
            "loss": dl.CriterionCallback("restored", "targets", metric_key="loss_ae"),
        },
        valid_metric="loss_ae",
        num_epochs=2,
        **distributed(workers),
    )
    optimizer, means = torch.optim.Adam(plain.parameters(), lr=0.01), []
    for _ in range(2):
        sums = 0.0
        for x, _, _ in batches():
            optimizer.zero_grad()
            loss = F.mse_loss(plain(x)[1], x)
            loss.backward()
            optimizer.step()
            sums += loss.item() * len(x)
        means.append(sums / SAMPLES)
    assert_same(model, plain)
    assert history["train"]["loss_ae"] == pytest.approx(means, abs=1e-6)
    assert trace.events == []


def test_a_supervised_runner_with_hooks_of_batches() -> None:
    model, plain, trace = net(6, CLASSES, 1), net(6, CLASSES, 1), Trace()
    criterion = nn.CrossEntropyLoss()
    runner = OfOneBatch(device="cpu")
    history = runner.train(
        model=model,
        criterion=criterion,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(1),
        callbacks=[trace, dl.AccuracyCallback("logits", "targets")],
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y, _ in batches():
        optimizer.zero_grad()
        criterion(plain(x), y).backward()
        optimizer.step()
    assert_same(model, plain)
    x, y, _ = data().tensors
    assert history["valid"]["loss"] == [pytest.approx(criterion(plain(x), y).item(), abs=1e-6)]
    assert runner.evaluate_loader(loaders(1)["valid"])["loss"] == pytest.approx(
        history["valid"]["loss"][0]
    )
