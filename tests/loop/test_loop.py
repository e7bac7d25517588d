"""`allhands.Loop`: steps that the user writes, on any number of workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allhands
from tests.loop.own_loops import (
    SAMPLES,
    SLICES,
    Left,
    assert_same,
    batches_by_hand,
    classifier_by_hand,
    contrast,
    d_loss,
    data,
    gan_loop,
    loaders,
    net,
    noise,
    run,
    small,
    weights,
)
from tests.worlds import in_world


def train_classifier(workers: int, accumulate: int = 1, clip: float | None = None) -> Any:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loaders=loaders(workers, accumulate),
        clip_norm=clip,
        accumulate=accumulate,
    )

    def loss_of(batch: Any) -> Any:
        x, y = batch
        output = loop.model(x)
        return {
            "loss": F.cross_entropy(output, y),
            "right": (output.argmax(1) == y).double().mean(),
        }

    for epoch in loop.epochs(2):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)
    return weights(model), loop.history


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_is_the_loop_by_hand(accumulate: int) -> None:
    found, history = train_classifier(1, accumulate, clip=0.5)
    expected, losses = classifier_by_hand(clip=0.5)
    assert_same(found, expected)
    half = len(losses) // 2
    assert history["train"]["loss"][1] == pytest.approx(sum(losses[half:]) / SAMPLES, abs=1e-5)
    assert history["valid"].keys() == {"loss", "right"}


@pytest.mark.serial
# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_workers_are_the_loop_by_hand(workers: int) -> None:
    expected, losses = classifier_by_hand()
    for found, history in in_world(workers, train_classifier, workers):
        assert_same(found, expected)
        half = len(losses) // 2
        assert history["train"]["loss"][0] == pytest.approx(sum(losses[:half]) / SAMPLES, abs=1e-5)


def train_gan(shares: int, strategy: Any = None) -> Any:
    loop, g, d = gan_loop(shares, strategy=strategy)

    def of_d(batch: Any) -> torch.Tensor:
        real = batch[0]
        return d_loss(loop.models["d"], real, loop.models["g"](loop.randn(len(real), 4)))

    def of_g(batch: Any) -> torch.Tensor:
        return F.softplus(-loop.models["d"](loop.models["g"](loop.randn(len(batch[0]), 4)))).mean()

    def whole(batch: Any) -> torch.Tensor:
        return contrast(loop.gather(loop.models["g"](loop.randn(len(batch[0]), 4))))

    for epoch in loop.epochs(2):
        for batch in epoch.train:
            loop.step(of_d, batch, optimizer="d")
            loop.step(of_g, batch, optimizer="g")
            loop.step(whole, batch, optimizer="g", again=True)
    return weights(g, d), loop.history


def gan_by_hand() -> list[torch.Tensor]:
    g, d = net(4, 6), net(6, 1, seed=1)
    of_g = torch.optim.Adam(g.parameters(), lr=0.01)
    of_d = torch.optim.SGD(d.parameters(), lr=0.1)
    for iteration, (x, _) in enumerate(batches_by_hand(2)):
        steps = [
            (of_d, lambda z: d_loss(d, x, g(z))),  # noqa: B023
            (of_g, lambda z: F.softplus(-d(g(z))).mean()),
            (of_g, lambda z: contrast(g(z))),
        ]
        for number, (optimizer, loss_of) in enumerate(steps):
            of_g.zero_grad()
            of_d.zero_grad()
            loss_of(noise(iteration, number, len(x))).backward()
            optimizer.step()
    return weights(g, d)


def test_each_optimizer_updates_its_own_model() -> None:
    found, history = train_gan(1)
    assert_same(found, gan_by_hand())
    assert history["train"].keys() == {"d_loss", "g_loss"}


@pytest.mark.serial
@pytest.mark.parametrize(
    ("workers", "shares", "strategy"),
    [
        # rare: conformance has them for other own loops, examples/test_own_loop.py has 2 and 3.
        pytest.param(2, 2, None, marks=pytest.mark.rare),
        (3, 3, None),
        pytest.param(2, 2, allhands.DDP(optimizer_state="sharded"), marks=pytest.mark.rare),
        pytest.param(2, 1, SLICES, marks=pytest.mark.rare),
        (4, 2, allhands.Mesh(dp=2, tp=2, tensor=SLICES)),
    ],
    ids=["2", "3", "sharded", "slices", "mesh"],
)
def test_optimizers_noise_and_whole_batches_on_workers(
    workers: int, shares: int, strategy: Any
) -> None:
    expected = gan_by_hand()
    for found, _ in in_world(workers, train_gan, shares, strategy):
        assert_same(found, expected)


def train_by_steps(
    workers: int, number: int = 20, first: int = 1, leave_at: int = 0, **given: Any
) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    loop = allhands.Loop(
        model=model,
        optimizer=optimizer,
        scheduler=(scheduler, "step"),
        loaders=loaders(workers),
        **given,
    )
    seen = []
    for step in loop.steps(number):
        loop.step(lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]), step.batch)
        if step.every(8):
            step.evaluate("valid", lambda batch: F.cross_entropy(loop.model(batch[0]), batch[1]))
            step.log(**step.train())
        seen.append(step.number)
        if step.number == leave_at:
            raise Left
    assert seen == list(range(first, number + 1))
    return weights(model), loop.history


def by_steps_by_hand(number: int = 20) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    for x, y in itertools.islice(batches_by_hand(9), number):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


def test_steps_go_on_over_passes_of_the_data() -> None:
    found, history = train_by_steps(1)
    assert_same(found, by_steps_by_hand())
    assert history["step"] == [8, 16]
    assert len(history["valid"]["loss"]) == 2


@pytest.mark.serial
def test_steps_on_two_workers() -> None:
    for found, _ in in_world(2, train_by_steps, 2):
        assert_same(found, by_steps_by_hand())


@pytest.mark.parametrize("within", [False, True], ids=["at the end", "within the second part"])
def test_more_steps_go_on_after_the_last(
    tmp_path: Path, within: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"logdir": tmp_path, "resume": "auto"}
    train_by_steps(1, 9, **given)
    train_by_steps(1, 9, 10, **given)  # which leaves nothing
    if within:
        with pytest.raises(Left):
            train_by_steps(1, 20, 10, leave_at=15, save_every=3, **given)
    found, history = train_by_steps(1, 20, 13 if within else 10, **given)
    assert_same(found, by_steps_by_hand())
    assert history["step"] == [8, 16]
    assert "16/20" in capsys.readouterr().out


def test_more_iterations_of_ones_own_go_on_after_the_last(tmp_path: Path) -> None:
    x, y = data().tensors

    def train(number: int, folder: Path) -> tuple[list[torch.Tensor], int]:
        model = net()
        loop = allhands.Loop(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            logdir=folder,
            resume="auto",
        )
        taken = 0
        for step in loop.steps(number):
            taken += 1
            rows = slice(5 * (step.number % 8), 5 * (step.number % 8) + 5)
            loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), (x[rows], y[rows]))
        return weights(model), taken

    expected, _ = train(9, tmp_path / "whole")
    assert [train(number, tmp_path / "parts")[1] for number in (5, 4)] == [5, 0]
    found, taken = train(9, tmp_path / "parts")
    assert taken == 4
    assert_same(found, expected)


def train_on_own_batches(cuts: tuple[int, ...], strategy: Any = None) -> Any:
    """`cuts` divide ten samples among the shares."""
    model = net()
    loop = allhands.Loop(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy
    )
    x, y = data().tensors
    share = loop.world.rank if cuts else 0

    def loss_of(batch: Any) -> torch.Tensor:
        blurred = batch[0] + 0.1 * loop.randn(len(batch[0]), 6)
        return F.cross_entropy(loop.model(blurred), batch[1])

    for step in loop.steps(4):
        assert step.batch is None
        first = 10 * (step.number - 1)
        rows = torch.arange(first, first + 10).tensor_split(cuts)[share]
        centre = loop.mean(x[rows].mean(), len(rows))
        assert float(centre) == pytest.approx(float(x[first : first + 10].mean()), abs=1e-6)
        loop.step(loss_of, (x[rows], y[rows]))
    return weights(model)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("workers", "cuts", "strategy"),
    [(3, (1, 8), None), (2, (), SLICES)],
    ids=["uneven", "slices"],
)
def test_batches_of_ones_own_are_one_global_batch(
    workers: int, cuts: tuple[int, ...], strategy: Any
) -> None:
    expected = train_on_own_batches(())
    for found in in_world(workers, train_on_own_batches, cuts, strategy):
        assert_same(found, expected)


@pytest.mark.serial
@pytest.mark.parametrize("cuts", [(3,), (5,)], ids=["of other numbers", "of one number"])
def test_ranks_of_one_share_are_given_the_same_rows(cuts: tuple[int, ...]) -> None:
    with pytest.raises(allhands.UserError, match=r"ranks 0 and 1 .* divide samples by loop\.share"):
        in_world(2, train_on_own_batches, cuts, SLICES)


def in_spawned(model: nn.Module) -> float:
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": loaders(2)["train"]},
    )
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch))
    loss: float = loop.history["train"]["loss"][0]
    return loss


@pytest.mark.serial
def test_spawn_gives_back_the_result_and_the_weights() -> None:
    model, alone = net(), net()
    loss = allhands.spawn(in_spawned, (model,), workers=2, device="cpu")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in batches_by_hand(1):
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    assert_same(weights(model), weights(alone))
    assert 0.5 < loss < 2


def test_stop_ends_the_training_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    loop, _ = small()
    for epoch in loop.epochs(9):
        for batch in epoch.train:
            loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch)
        if epoch.number == 2:
            loop.stop("for the test")
    assert loop.epoch == 2
    assert "stopped after epoch 2: for the test" in capsys.readouterr().out
    loop, _ = small()
    for step in loop.steps(9):
        loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), step.batch)
        if step.number == 3:
            loop.stop("for the test")
    assert loop.global_step == 3
    with pytest.raises(allhands.UserError, match=r"loop\.epochs\(number\)=0"):
        next(small()[0].epochs(0))
