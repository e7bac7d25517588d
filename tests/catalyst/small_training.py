"""What tests of runners with steps of their own train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands.catalyst import dl, metrics

# The last global batch has one sample: the second of two workers has none of it.
SAMPLES, GLOBAL, CLASSES = 41, 8, 4


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :CLASSES].argmax(1), x[:, 2:].argmax(1))


def net(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def loaders(workers: int) -> dict[str, DataLoader]:
    return {
        "train": DataLoader(data(), GLOBAL // workers),
        "valid": DataLoader(data(), 5),
    }


def batches() -> Any:
    tensors = data().tensors
    for part in torch.arange(SAMPLES).split(GLOBAL):
        yield tuple(tensor[part] for tensor in tensors)


def distributed(workers: int) -> dict[str, Any]:
    return {"ddp": True, "workers": workers} if workers > 1 else {}


on_workers = pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.serial)])


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=2e-6)


class Classifier(dl.Runner):
    def __init__(self, model: Any = None, **given: Any) -> None:
        super().__init__(model, **given)
        self.seen: list[str] = []

    def predict_batch(self, batch: Any) -> Any:
        return self.model(batch[0].to(self.engine.device))

    def on_loader_start(self, runner: Any) -> None:
        super().on_loader_start(runner)
        self.seen.append(f"{self.epoch_step} {self.loader_key}")
        self.meters = {
            key: metrics.AdditiveMetric(compute_on_call=False) for key in ("loss", "accuracy01")
        }

    def handle_batch(self, batch: Any) -> None:
        x, y, _ = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        accuracy01, accuracy03 = metrics.accuracy(logits, y, topk=(1, 3))
        self.batch_metrics.update({"loss": loss, "accuracy03": accuracy03})
        self.meters["loss"].update(loss.item(), self.batch_size)
        self.meters["accuracy01"].update(accuracy01.item(), self.batch_size)
        if self.is_train_loader:
            self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def on_loader_end(self, runner: Any) -> None:
        for key, meter in self.meters.items():
            self.loader_metrics[key] = meter.compute()[0]
        super().on_loader_end(runner)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net(6, 8, 3)
        self.one, self.two = net(8, CLASSES, 4), net(8, CLASSES, 5)

    def forward(self, x: torch.Tensor) -> Any:
        z = torch.tanh(self.body(x))
        return self.one(z), self.two(z)


class MultiHead(dl.Runner):
    def handle_batch(self, batch: Any) -> None:
        x, y1, y2 = batch
        logits1, logits2 = self.model(x)
        self.batch = {"logits1": logits1, "logits2": logits2, "targets1": y1, "targets2": y2}


class Trace(dl.Callback):
    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.events: list[str] = []
        self.losses: list[float] = []

    def on_experiment_start(self, runner: Any) -> None:
        self.events.append("experiment")

    def on_epoch_start(self, runner: Any) -> None:
        self.events.append(f"epoch {runner.epoch_step}")

    def on_loader_start(self, runner: Any) -> None:
        self.events.append(f"{runner.loader_key} {runner.is_train_loader}")

    def on_batch_end(self, runner: Any) -> None:
        self.losses.append(runner.batch_metrics["loss"].item())
        runner.batch_metrics["twice"] = 2 * runner.batch_metrics["loss"]

    def on_loader_end(self, runner: Any) -> None:
        self.events.append(f"end {runner.loader_key} {runner.loader_batch_step}")
        runner.loader_metrics["constant"] = 3

    def on_epoch_end(self, runner: Any) -> None:
        self.events.append(f"end {runner.epoch_step} {sorted(runner.epoch_metrics)}")

    def on_experiment_end(self, runner: Any) -> None:
        self.events.append("end")


class OfOneBatch(dl.SupervisedRunner):
    def handle_batch(self, batch: Any) -> None:  # type: ignore[override]
        x, y, _ = batch
        self.batch = {"features": x, "logits": self.model(x), "targets": y}
