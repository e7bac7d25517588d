"""Runners with a ``handle_batch`` of their own, as scripts for Catalyst have them."""

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
    Classifier,
    assert_same,
    batches,
    data,
    distributed,
    loaders,
    net,
    on_workers,
)


@on_workers
def test_a_runner_with_meters_and_a_step_of_its_own(workers: int, preloaded: None) -> None:
    model, plain = net(6, CLASSES, 1), net(6, CLASSES, 1)
    runner = Classifier(device="cpu")
    history = runner.train(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders=loaders(workers),
        num_epochs=2,
        valid_loader="valid",
        valid_metric="accuracy01",
        minimize_valid_metric=False,
        **distributed(workers),
    )
    optimizer, losses = torch.optim.Adam(plain.parameters(), lr=0.02), []
    for _ in range(2):
        sums = 0.0
        for x, y, _ in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            sums += loss.item() * len(x)
        losses.append(sums / SAMPLES)
    assert_same(model, plain)
    assert history["train"]["loss"] == pytest.approx(losses, abs=1e-6)
    x, y, _ = data().tensors
    logits = plain(x).detach()
    right = (logits.topk(3, dim=1).indices == y[:, None]).float()
    for name, value in (("accuracy01", right[:, 0].mean()), ("accuracy03", right.sum(1).mean())):
        assert history["valid"][name][-1] == pytest.approx(value.item(), abs=1e-6)
    assert runner.seen == ["1 train", "1 valid", "2 train", "2 valid"]
    assert runner.epoch_metrics["valid"]["loss"] == pytest.approx(F.cross_entropy(logits, y).item())

    found = runner.evaluate_loader(loaders(1)["valid"])
    assert found["accuracy01"] == pytest.approx(right[:, 0].mean().item(), abs=1e-6)
    predicted = list(runner.predict_loader(loader=loaders(1)["valid"]))
    assert [len(rows) for rows in predicted] == [5] * 8 + [1]
    torch.testing.assert_close(torch.cat(predicted), logits, rtol=0, atol=1e-5)


@on_workers
@pytest.mark.parametrize("given", [{"accumulate": 2}, {"precision": "bf16"}])
def test_accumulation_and_precision(workers: int, given: Any, preloaded: None) -> None:
    model, plain = net(6, CLASSES, 1), net(6, CLASSES, 1)
    Classifier(model, device="cpu").train(
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(data(), GLOBAL // workers // given.get("accumulate", 1))},
        valid_metric="accuracy01",
        **given,
        **distributed(workers),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y, _ in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="precision" in given):
            loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
    if "precision" not in given:
        assert_same(model, plain)
        return
    for name, value in model.state_dict().items():  # parts of a batch are rounded by themselves
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=5e-3)


def test_hooks_of_epochs_keep_every_strategy() -> None:
    class Epochs(dl.Callback):
        def on_epoch_end(self, runner: Any) -> None:
            seen.append((runner.epoch_step, sorted(runner.epoch_metrics)))
            runner.need_early_stop = True

    seen: list[Any] = []
    model = net(6, CLASSES, 1)
    x, y, _ = data().tensors
    history = dl.SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, y), 8)},
        callbacks=[Epochs()],
        num_epochs=5,
        distributed="fsdp",
        workers=1,
    )
    assert history["epoch"] == [1]
    assert not seen or seen == [(1, ["train"])]  # a worker's own list
