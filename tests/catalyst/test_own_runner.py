"""Runners with a ``handle_batch`` of their own, as scripts for Catalyst have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import UserError
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


# ---------------------------------------------------------------------- one model, a step by hand


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


# ---------------------------------------------------------------------- two models, by callbacks


class GAN(dl.Runner):
    def handle_batch(self, batch: Any) -> None:
        x, y, _ = batch
        noise = x[:, :2] * 2
        fake = self.model["generator"](noise)
        self.batch = {
            "combined": self.model["discriminator"](torch.cat([fake.detach(), x], dim=1)),
            "labels": (y > 1).float()[:, None],
            "generated": self.model["discriminator"](torch.cat([fake, fake], dim=1)),
            "misleading": torch.zeros(len(x), 1),
        }


def gan_models() -> dict[str, nn.Module]:
    return {"generator": net(2, 6, 1), "discriminator": net(12, 1, 2)}


def gan_optimizers(model: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(model["generator"].parameters(), lr=0.01),
        "discriminator": torch.optim.SGD(model["discriminator"].parameters(), lr=0.1),
    }


def gan_callbacks() -> list[Any]:
    made = []
    for name, output, target in (
        ("discriminator", "combined", "labels"),
        ("generator", "generated", "misleading"),
    ):
        made += [
            dl.CriterionCallback(
                input_key=output,
                target_key=target,
                metric_key=f"loss_{name}",
                criterion_key=name,
            ),
            dl.BackwardCallback(metric_key=f"loss_{name}"),
            dl.OptimizerCallback(optimizer_key=name, metric_key=f"loss_{name}"),
        ]
    return made


@on_workers
def test_a_gan_of_callbacks(workers: int, preloaded: None) -> None:
    model, plain = gan_models(), gan_models()
    bce = nn.BCEWithLogitsLoss()
    schedule = torch.optim.lr_scheduler.ExponentialLR
    given = gan_optimizers(model)
    history = GAN(device="cpu").train(
        model=model,
        criterion={"generator": nn.BCEWithLogitsLoss(), "discriminator": bce},
        optimizer=given,
        scheduler={"generator": schedule(given["generator"], 0.5)},
        loaders={"train": loaders(workers)["train"]},
        callbacks=[
            *gan_callbacks(),
            dl.SchedulerCallback(scheduler_key="generator", mode="epoch"),
        ],
        valid_loader="train",
        valid_metric="loss_generator",
        minimize_valid_metric=True,
        num_epochs=2,
        **distributed(workers),
    )
    own = gan_optimizers(plain)
    halved = schedule(own["generator"], 0.5)
    sums: dict[str, float] = {}
    for _ in range(2):
        sums = {"loss_generator": 0.0, "loss_discriminator": 0.0}
        for x, y, _ in batches():
            fake = plain["generator"](x[:, :2] * 2)
            combined = plain["discriminator"](torch.cat([fake.detach(), x], dim=1))
            generated = plain["discriminator"](torch.cat([fake, fake], dim=1))
            d_loss = bce(combined, (y > 1).float()[:, None])
            g_loss = bce(generated, torch.zeros(len(x), 1))
            d_loss.backward()
            g_loss.backward()  # as there, it adds to the discriminator's gradients
            for name in ("discriminator", "generator"):
                own[name].step()
                own[name].zero_grad()
            sums["loss_generator"] += g_loss.item() * len(x)
            sums["loss_discriminator"] += d_loss.item() * len(x)
        halved.step()
    for name in plain:
        assert_same(model[name], plain[name])
    assert history["train"].keys() == sums.keys()
    for name, value in sums.items():
        assert history["train"][name][-1] == pytest.approx(value / SAMPLES, abs=1e-6)


class GANByHand(dl.Runner):
    """Takes both steps itself, the second with the weights of the first."""

    def handle_batch(self, batch: Any) -> None:
        x, _, _ = batch
        for name, loss in zip(("discriminator", "generator"), losses(self.model, x), strict=True):
            value = loss()
            self.engine.backward(value)
            self.optimizer[name].step()
            self.optimizer[name].zero_grad()
            self.batch_metrics[name] = value


def losses(model: Any, x: torch.Tensor) -> Any:
    def of(fake: torch.Tensor) -> torch.Tensor:
        return F.softplus(model["discriminator"](torch.cat([fake, x], dim=1))).mean()

    yield lambda: of(model["generator"](x[:, :2]).detach())
    yield lambda: -of(model["generator"](x[:, :2]))


@on_workers
def test_two_steps_of_one_batch(workers: int, preloaded: None) -> None:
    model, plain = gan_models(), gan_models()
    GANByHand(device="cpu").train(
        model=model,
        optimizer=gan_optimizers(model),
        loaders={"train": loaders(workers)["train"]},
        valid_metric="generator",
        **distributed(workers),
    )
    own = gan_optimizers(plain)
    for x, _, _ in batches():
        for name, loss in zip(("discriminator", "generator"), losses(plain, x), strict=True):
            loss().backward()  # what the second leaves in the discriminator stays there, as above
            own[name].step()
            own[name].zero_grad()
    for name in plain:
        assert_same(model[name], plain[name])


# ---------------------------------------------------------------------- several outputs


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


def head_callbacks() -> list[Any]:
    made = [
        dl.CriterionCallback(
            input_key=f"logits{i}", target_key=f"targets{i}", metric_key=f"loss{i}"
        )
        for i in (1, 2)
    ]
    return [
        *made,
        dl.MetricAggregationCallback(
            metric_key="loss", metrics={"loss1": 3.0, "loss2": 1.0}, mode="weighted_mean"
        ),
        dl.BackwardCallback(metric_key="loss"),
        dl.OptimizerCallback(metric_key="loss"),
        dl.AccuracyCallback(
            input_key="logits1", target_key="targets1", num_classes=CLASSES, prefix="one_"
        ),
        dl.PrecisionRecallF1SupportCallback(
            input_key="logits2", target_key="targets2", num_classes=CLASSES, prefix="two_"
        ),
    ]


@on_workers
def test_two_heads_with_a_criterion_each(workers: int, preloaded: None) -> None:
    model, plain, trace = TwoHeads(), TwoHeads(), Trace()
    runner = MultiHead(device="cpu")
    history = runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        loaders=loaders(workers),
        callbacks=[*head_callbacks(), trace],
        valid_loader="valid",
        valid_metric="one_accuracy01",
        minimize_valid_metric=False,
        num_epochs=2,
        **distributed(workers),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)

    def loss_of(x: Any, y1: Any, y2: Any) -> Any:
        one, two = plain(x)
        return (3 * F.cross_entropy(one, y1) + F.cross_entropy(two, y2)) / 4, one, two

    for _ in range(2):
        for batch in batches():
            optimizer.zero_grad()
            loss_of(*batch)[0].backward()
            optimizer.step()
    assert_same(model, plain)
    x, y1, y2 = data().tensors
    loss, one, two = loss_of(x, y1, y2)
    valid = {name: values[-1] for name, values in history["valid"].items()}
    assert valid["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert valid["twice"] == pytest.approx(2 * loss.item(), abs=1e-6)
    assert valid["one_accuracy"] == pytest.approx((one.argmax(1) == y1).float().mean().item())
    assert valid["two_precision/_micro"] == pytest.approx(
        (two.argmax(1) == y2).float().mean().item()
    )
    assert history["train"]["constant"] == [3.0, 3.0]
    train, steps = "train True", -(-SAMPLES // GLOBAL)
    epoch = [train, f"end train {steps}", "valid False"]
    assert trace.events[:5] == ["experiment", "epoch 1", *epoch]
    assert trace.events[-2:] == ["end 2 ['train', 'valid']", "end"]
    assert len(trace.losses) == 2 * (steps + (9 if workers == 1 else 5))


def test_models_in_a_module_and_members_that_a_callback_makes() -> None:
    class Transformed(GAN):
        def handle_batch(self, batch: Any) -> None:
            super().handle_batch(batch)
            seen.append(sorted(self.model))

    seen: list[Any] = []
    model, plain = nn.ModuleDict(gan_models()), gan_models()
    halves = dl.BatchTransformCallback(
        lambda labels, wrong: (labels / 2, wrong + 0.5),
        scope="on_batch_end",
        input_key=["labels", "misleading"],
        output_key=["labels", "misleading"],
    )
    bce = nn.BCEWithLogitsLoss()
    Transformed(device="cpu").train(
        model=model,
        criterion={"generator": bce, "discriminator": bce},
        optimizer=gan_optimizers(model),  # type: ignore[arg-type]
        loaders={"train": loaders(1)["train"]},
        callbacks=[halves, *gan_callbacks()],
        valid_metric="loss_generator",
    )
    own = gan_optimizers(plain)
    for x, y, _ in batches():
        fake = plain["generator"](x[:, :2] * 2)
        combined = plain["discriminator"](torch.cat([fake.detach(), x], dim=1))
        bce(combined, (y > 1).float()[:, None] / 2).backward()
        generated = plain["discriminator"](torch.cat([fake, fake], dim=1))
        bce(generated, torch.full((len(x), 1), 0.5)).backward()
        for optimizer in own.values():
            optimizer.step()
            optimizer.zero_grad()
    for name in plain:
        assert_same(model[name], plain[name])
    assert seen[0] == ["discriminator", "generator"]


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


class OfOneBatch(dl.SupervisedRunner):
    def handle_batch(self, batch: Any) -> None:  # type: ignore[override]
        x, y, _ = batch
        self.batch = {"features": x, "logits": self.model(x), "targets": y}


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


# ---------------------------------------------------------------------- what is refused


class Forgets(Classifier):
    def handle_batch(self, batch: Any) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        if self.is_train_loader:
            self.engine.backward(loss)
            self.optimizer.step()


class Raw(Classifier):
    def handle_batch(self, batch: Any) -> None:
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()


class Early(Classifier):
    def handle_batch(self, batch: Any) -> None:
        self.optimizer.step()


class Misspelt(Classifier):
    def on_loader_begin(self, runner: Any) -> None:
        pass


class WrongArguments(Classifier):
    def on_loader_end(self) -> None:  # type: ignore[override]
        pass


class MisspeltHook(dl.Callback):
    def on_batch_begin(self, runner: Any) -> None:
        pass


def train(runner: Any, **given: Any) -> Any:
    model = net(6, CLASSES, 1)
    objects = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loaders": {"train": loaders(1)["train"]},
    }
    return runner.train(**objects | given)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (dl.Runner, {}, r"Runner has no step; write def handle_batch\(self, batch\)"),
        (Forgets, {}, r"without optimizer.zero_grad\(\)"),
        (Raw, {}, r"loss.backward\(\) was called outside .*write self.engine.backward\(loss\)"),
        (Early, {}, r"optimizer.step\(\) before engine.backward\(loss\)"),
        (Misspelt, {}, "on_loader_begin"),
        (WrongArguments, {}, r"write def on_loader_end\(self, runner\)"),
        (Classifier, {"callbacks": [MisspeltHook()]}, "MisspeltHook.on_batch_begin looks like"),
        (Classifier, {"evaluate_every": 2}, "evaluate_every with Classifier"),
        (Classifier, {"distributed": "kvstore"}, "engine.backward with strategy 'kvstore'"),
        (
            MultiHead,
            {"model": TwoHeads(), "callbacks": [dl.CriterionCallback("logits3", "targets1")]},
            "optimizer",
        ),
        (
            Classifier,
            {"callbacks": [dl.CriterionCallback("logits", "targets")]},
            r"CriterionCallback looks up 'logits', and the batch is a tuple",
        ),
        (
            Classifier,
            {"callbacks": [dl.OptimizerCallback(optimizer_key="x")]},
            r"OptimizerCallback\(optimizer_key='x'\): there is one optimizer",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(kind(device="cpu"), **given)


class Overlap(nn.Module):
    """A ratio of sums over the batch, as losses of segmentation are."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chosen = output.softmax(1)[torch.arange(len(target)), target]
        return 1 - chosen.sum() / (output.softmax(1).square().sum() + 1)


def test_a_criterion_that_is_no_mean_is_named_where_batches_are_divided() -> None:
    given = {"criterion": Overlap(), "callbacks": [dl.AccuracyCallback("logits", "targets")]}
    train(OfOneBatch(device="cpu"), **given)
    with pytest.raises(UserError, match="Overlap"):
        train(OfOneBatch(device="cpu"), accumulate=2, **given)


class OnEachRank(Classifier):
    def on_loader_end(self, runner: Any) -> None:
        self.loader_metrics["own"] = float(self.batch_size + 10 * self.engine.process_index)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (OnEachRank, {}, r"loader_metrics\['own'\] is .*set batch_metrics\['own'\]"),
        (
            OfOneBatch,
            {"criterion": nn.CrossEntropyLoss(weight=torch.ones(CLASSES) / 2)},
            "a mean over the samples, and CrossEntropyLoss sums, weighs or leaves out",
        ),
    ],
)
def test_what_is_no_mean_of_all_workers_is_named(
    kind: Any, given: Any, said: str, preloaded: None
) -> None:
    with pytest.raises(Exception, match=said):
        train(kind(device="cpu"), ddp=True, workers=2, **given)


def test_hooks_for_another_runner_are_refused() -> None:
    from allhands import SupervisedRunner

    with pytest.raises(UserError, match=r"Trace is a Callback of allhands.catalyst"):
        train(SupervisedRunner(device="cpu"), callbacks=[Trace()])
