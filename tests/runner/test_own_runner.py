"""A runner of one's own: steps that the user writes, the runner's epochs around them."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP, FSDP, Callback, EarlyStopping, KVStore, Runner
from allhands.data import global_order
from tests.worlds import in_world

# The last global batch has 5 samples: with three workers, one of them has one.
SAMPLES, GLOBAL, SEED = 53, 12, 42


def rows() -> torch.Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))


def net(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def models() -> dict[str, nn.Module]:
    return {"g": net(3, 6, 0), "d": net(6, 1, 1)}


def optimizers(made: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "g": torch.optim.Adam(made["g"].parameters(), lr=0.01),
        "d": torch.optim.SGD(made["d"].parameters(), lr=0.1, momentum=0.5),
    }


def d_loss_of(g: nn.Module, d: nn.Module, real: Any, noise: Any) -> torch.Tensor:
    return F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()


def g_loss_of(g: nn.Module, d: nn.Module, noise: Any) -> torch.Tensor:
    return F.softplus(-d(g(noise))).mean()


class GAN(Runner):
    """The noise of a sample is in the data, behind its six numbers."""

    def train_step(self, loop: Any, batch: Any) -> None:
        g, d = loop.models["g"], loop.models["d"]

        def d_loss(batch: Any) -> Any:
            real, noise = batch
            loss = d_loss_of(g, d, real, noise)
            return {"loss": loss, "real": d(real).mean()}

        def g_loss(batch: Any) -> Any:
            return g_loss_of(g, d, batch[1])

        loop.step(d_loss, batch, optimizer="d")
        loop.step(g_loss, batch, optimizer="g")

    def valid_step(self, loop: Any, batch: Any) -> Any:
        real, noise = batch
        g, d = loop.models["g"], loop.models["d"]
        high = d(real) > 0
        return {
            "loss": g_loss_of(g, d, noise),
            "high": (high.sum(), len(high)),
            "of_high": (real[high.squeeze(1)].sum(), high.sum()),
        }


def data() -> TensorDataset:
    noise = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
    return TensorDataset(rows(), noise)


def train(workers: int, strategy: Any = False, **changes: Any) -> Any:
    made = models()
    given: dict[str, Any] = {
        "model": made,
        "optimizer": optimizers(made),
        "loaders": {
            "train": DataLoader(data(), GLOBAL // workers, shuffle=True),
            "valid": DataLoader(data(), 7),
        },
        "num_epochs": 3,
        "distributed": strategy,
    }
    given |= changes
    given["workers"] = given.pop("started", None)
    runner = given.pop("runner", None) or GAN(device="cpu")
    history = runner.train(**given)
    return {
        f"{name}.{key}": value.detach().clone()
        for name, model in given["model"].items()
        for key, value in model.state_dict().items()
    }, history


def by_hand(epochs: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    made = models()
    g, d = made["g"], made["d"]
    own = optimizers(made)
    schedule = torch.optim.lr_scheduler.ExponentialLR(own["g"], 0.5)
    real_rows, noise_rows = data().tensors
    found: dict[str, list[float]] = {"d_loss": [], "g_loss": [], "valid": [], "of_high": []}
    for epoch in range(epochs):
        sums = {"d_loss": 0.0, "g_loss": 0.0}
        for part in global_order(SAMPLES, SEED, epoch).split(GLOBAL):
            real, noise = real_rows[part], noise_rows[part]
            own["d"].zero_grad()
            loss = d_loss_of(g, d, real, noise)
            loss.backward()
            own["d"].step()
            sums["d_loss"] += loss.item() * len(part)
            own["g"].zero_grad()
            loss = g_loss_of(g, d, noise)
            loss.backward()
            own["g"].step()
            sums["g_loss"] += loss.item() * len(part)
        schedule.step()
        with torch.no_grad():
            found["valid"].append(g_loss_of(g, d, noise_rows).item())
            high = real_rows[(d(real_rows) > 0).squeeze(1)]
            found["of_high"].append(float(high.sum()) / len(high) if len(high) else float("nan"))
        for name, value in sums.items():
            found[name].append(value / SAMPLES)
    return {
        f"{name}.{key}": value.detach()
        for name, model in made.items()
        for key, value in model.state_dict().items()
    }, found


def scheduled(workers: int, strategy: Any = False) -> Any:
    made = models()
    own = optimizers(made)
    schedule = torch.optim.lr_scheduler.ExponentialLR(own["g"], 0.5)
    return train(workers, strategy, model=made, optimizer=own, scheduler={"g": schedule})


def assert_by_hand(weights: dict[str, torch.Tensor], history: Any) -> None:
    expected, found = by_hand()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    assert history["train"].keys() == {"d_loss", "g_loss", "real"}
    for name in ("d_loss", "g_loss"):
        assert history["train"][name] == pytest.approx(found[name], abs=1e-5)
    assert history["valid"]["loss"] == pytest.approx(found["valid"], abs=1e-5)
    assert history["valid"]["of_high"] == pytest.approx(found["of_high"], abs=1e-5, nan_ok=True)


def test_one_process_is_the_loop_by_hand() -> None:
    assert_by_hand(*scheduled(1))


@pytest.mark.serial
# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_workers_are_the_loop_by_hand(workers: int) -> None:
    for weights, history in in_world(workers, scheduled, workers):
        assert_by_hand(weights, history)


@pytest.mark.serial
@pytest.mark.parametrize(
    "strategy",
    [DDP(optimizer_state="sharded"), FSDP(), KVStore()],
    ids=["sharded", "fsdp", "kvstore"],
)
def test_strategies_are_the_loop_by_hand(strategy: Any) -> None:
    for weights, history in in_world(2, scheduled, 2, strategy):
        assert_by_hand(weights, history)


@pytest.mark.serial
def test_workers_that_train_starts_hand_everything_back(preloaded: None) -> None:
    made = models()
    own = optimizers(made)
    runner = GAN({"g": made["g"], "d": made["d"]}, device="cpu")
    schedule = torch.optim.lr_scheduler.ExponentialLR(own["g"], 0.5)
    keep = Keeps()
    history = runner.train(
        optimizer=own,
        scheduler={"g": schedule},
        loaders={
            "train": DataLoader(data(), GLOBAL // 2, shuffle=True),
            "valid": DataLoader(data(), 7),
        },
        num_epochs=3,
        callbacks=[keep],
        distributed=True,
        workers=2,
    )
    weights = {
        f"{name}.{key}": value
        for name, one in made.items()
        for key, value in one.state_dict().items()
    }
    assert_by_hand(weights, history)
    assert own["g"].param_groups[0]["lr"] == 0.01 / 8
    assert len(own["d"].state) == 4
    assert keep.seen == [(5, "ModuleDict"), (10, "ModuleDict"), (15, "ModuleDict")]


class Keeps(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_epoch_end(self, training: Any) -> None:
        self.seen.append((training.step, type(training.model).__name__))


class Methods(GAN):
    """The step functions are methods, which use the runner's own models."""

    def train_step(self, loop: Any, batch: Any) -> None:
        loop.step(self.d_loss, batch, optimizer="d")
        loop.step(self.g_loss, batch, optimizer="g")

    def d_loss(self, batch: Any) -> Any:
        return d_loss_of(self.model["g"], self.model["d"], *batch)

    def g_loss(self, batch: Any) -> Any:
        return g_loss_of(self.model["g"], self.model["d"], batch[1])


@pytest.mark.serial
def test_steps_may_be_methods_with_the_runners_models(preloaded: None) -> None:
    expected, _ = train(1)
    for workers, strategy in ((1, False), (2, "ddp")):
        given: dict[str, Any] = {"runner": Methods(device="cpu")}
        if workers > 1:
            given["started"] = workers
        weights, _ = train(workers, strategy, **given)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- one model, a criterion


class Classify(Runner):
    """What a SupervisedRunner does, with steps of its own; a moving average of the weights is kept
    beside."""

    def train_step(self, loop: Any, batch: Any) -> None:
        def loss_of(batch: Any) -> Any:
            return self.criterion["ce"](loop.model(batch[0]), batch[1])

        loop.step(loss_of, batch)

    def valid_step(self, loop: Any, batch: Any) -> Any:
        output = loop.model(batch[0])
        right = (output.argmax(1) == batch[1]).double().mean()
        return {"loss": self.criterion["ce"](output, batch[1]), "accuracy": right}


def classes() -> TensorDataset:
    x = rows()
    return TensorDataset(x, (x[:, 0] > 0).long())


def test_one_model_is_as_with_a_supervised_runner() -> None:
    found = []
    for own in (True, False):
        model = net(6, 2, 3)
        runner = Classify(device="cpu") if own else allhands.SupervisedRunner(device="cpu")
        criterion: Any = nn.CrossEntropyLoss()
        history = runner.train(
            model=model,
            criterion={"ce": criterion} if own else criterion,
            optimizer=(optimizer := torch.optim.Adam(model.parameters(), lr=0.05)),
            scheduler=(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "step"),
            metrics=None if own else ["accuracy"],
            loaders={
                "train": DataLoader(classes(), 8, shuffle=True),
                "valid": DataLoader(classes(), 8),
            },
            num_epochs=4,
            accumulate=2,
            clip_norm=0.3,
            main_metric="accuracy",
            minimize_metric=False,
            load_best_on_end=True,
            callbacks=[EarlyStopping(2, "accuracy", minimize=False)],
        )
        assert runner.model is model
        found.append((history, model))
    (mine, model), (theirs, plain) = found
    assert mine["valid"] == theirs["valid"]
    assert mine["lr"] == theirs["lr"]
    assert mine["train"]["loss"] == theirs["train"]["loss"]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------- going on


class Count:
    """How many batches a training has had, over all its parts."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Averaged(GAN):
    """Keeps a moving average of the generator, which no optimizer trains; draws noise."""

    def __init__(self, term: int | None = None) -> None:
        super().__init__(device="cpu")
        self.term, self.steps, self.count = term, 0, Count()

    def setup(self, loop: Any) -> None:
        loop.register("count", self.count)

    def train_step(self, loop: Any, batch: Any) -> None:
        def g_loss(batch: Any) -> Any:
            return g_loss_of(loop.models["g"], loop.models["d"], loop.randn(len(batch[0]), 3))

        super().train_step(loop, batch)
        loop.step(g_loss, batch, optimizer="g", again=True)
        with torch.no_grad():
            pairs = zip(
                loop.models["mean"].parameters(), loop.models["g"].parameters(), strict=True
            )
            for mean, own in pairs:
                mean.lerp_(own, 0.1)
        self.steps += 1
        self.count.value += 1
        if self.steps == self.term:
            os.kill(os.getpid(), signal.SIGTERM)

    def valid_step(self, loop: Any, batch: Any) -> Any:
        loss = g_loss_of(loop.models["mean"], loop.models["d"], batch[1])
        return {"loss": loss, "batches": (self.count.value, 1)}


def averaged(term: int | None = None, **changes: Any) -> Any:
    made = models()
    own = optimizers(made)
    made["mean"] = net(3, 6, 0)
    return train(1, runner=Averaged(term), model=made, optimizer=own, **changes)


@pytest.mark.parametrize("by_steps", [False, True])
def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path, by_steps: bool) -> None:
    changes: dict[str, Any] = {"evaluate_every": 4} if by_steps else {}
    weights, history = averaged(**changes)
    with pytest.raises(SystemExit):
        averaged(7, logdir=tmp_path, **changes)
    again, resumed = averaged(logdir=tmp_path, resume="auto", **changes)
    assert all(torch.equal(weights[name], value) for name, value in again.items())
    for part in ("train", "valid", "step", "epoch"):
        assert resumed[part] == history[part]
    assert history["step"] == ([4, 8, 12, 15] if by_steps else [5, 10, 15])
    assert history["valid"]["batches"] == history["step"]
    with (tmp_path / "metrics.csv").open() as file:
        written = [float(row["train_d_loss"]) for row in csv.DictReader(file)]
    assert written == history["train"]["d_loss"]


@pytest.mark.parametrize("logs", [False, True])
def test_the_best_weights_are_those_of_all_models(logs: bool, tmp_path: Path) -> None:
    class FirstIsBest(Averaged):
        evaluated = 0

        def valid_step(self, loop: Any, batch: Any) -> Any:
            self.evaluated += len(batch[0])
            return torch.tensor(float(self.evaluated))

    def run(epochs: int, **changes: Any) -> Any:
        made = models()
        own = optimizers(made)
        made["mean"] = net(3, 6, 0)
        given = {"model": made, "optimizer": own, "num_epochs": epochs}
        return train(1, runner=FirstIsBest(), **given, **changes)

    first, _ = run(1)
    weights, history = run(3, load_best_on_end=True, logdir=tmp_path if logs else None)
    assert history["valid"]["loss"] == sorted(history["valid"]["loss"])
    assert all(torch.equal(first[name], value) for name, value in weights.items())
