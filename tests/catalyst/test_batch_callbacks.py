"""Callbacks that take the steps of a batch: criteria, backward passes, optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands.catalyst import dl
from tests.catalyst.small_training import (
    CLASSES,
    GLOBAL,
    SAMPLES,
    MultiHead,
    Trace,
    TwoHeads,
    assert_same,
    batches,
    data,
    distributed,
    loaders,
    net,
    on_workers,
)


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
