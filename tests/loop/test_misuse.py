"""What own loops refuse, and what they say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import allhands
from tests.loop.own_loops import assert_same, loaders, net, run, small, weights
from tests.worlds import in_world


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda loop: lambda batch: None, "returned nothing; end it with `return loss`"),
        (lambda loop: lambda batch: loop.model(batch[0]), "gave a loss of shape [12, 3]"),
        (lambda loop: lambda batch: loop.model(batch[0]).mean().detach(), "without a gradient"),
        (lambda loop: lambda batch: {"los": 1.0}, "must hold the loss"),
        (lambda loop: lambda batch: 1.0, "gave a loss of a float"),
    ],
)
def test_what_is_no_loss_is_named(fn: Any, message: str) -> None:
    loop, _ = small()
    with pytest.raises(allhands.UserError, match=re.escape(message)):
        run(loop, lambda batch: loop.step(fn(loop), batch))


def test_passes_and_updates_outside_of_the_step_are_named() -> None:
    loop, model = small()
    with pytest.raises(allhands.UserError, match=r"loss\.backward\(\) was called outside of"):
        run(loop, lambda batch: model(batch[0]).mean().backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = allhands.Loop(model=model, optimizer=optimizer, loaders=loaders(1))
    with pytest.raises(allhands.UserError, match=r"optimizer\.step\(\) was called outside of"):
        run(loop, lambda batch: optimizer.step())


def test_a_batch_is_used_once() -> None:
    loop, _ = small()

    def twice(batch: Any) -> None:
        for _ in range(2):
            loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch)

    with pytest.raises(allhands.UserError, match="used for a step of 'optimizer' already"):
        run(loop, twice)


def test_an_optimizer_that_no_step_uses_is_named() -> None:
    g, d = net(), net(seed=1)
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.SGD(g.parameters(), lr=0.1),
            "d": torch.optim.SGD(d.parameters(), lr=0.1),
        },
        loaders=loaders(1),
    )

    def only_g(batch: Any) -> None:
        loop.step(lambda b: F.cross_entropy(loop.models["g"](b[0]), b[1]), batch, optimizer="g")

    with pytest.raises(allhands.UserError, match="no step used the optimizer 'd'"):
        run(loop, only_g)
    with pytest.raises(allhands.UserError, match="write loop.models\\['g'\\]"):
        _ = loop.model


def test_a_loss_that_is_no_mean_is_refused_where_a_batch_is_divided() -> None:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(1, accumulate=2),
        accumulate=2,
    )

    def summed(batch: Any) -> torch.Tensor:
        return F.cross_entropy(loop.model(batch[0]), batch[1], reduction="sum")

    with pytest.raises(allhands.UserError, match=r"Return the mean over the samples, or \(sum"):
        run(loop, lambda batch: loop.step(summed, batch))


def test_a_sum_with_its_count_is_taken() -> None:
    def train(accumulate: int) -> list[torch.Tensor]:
        model = net()
        loop = allhands.Loop(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loaders=loaders(1, accumulate),
            accumulate=accumulate,
        )

        def counted(batch: Any) -> Any:
            kept = batch[1] != 2
            loss = F.cross_entropy(loop.model(batch[0]), batch[1], reduction="none")
            return (loss * kept).sum(), kept.sum()

        run(loop, lambda batch: loop.step(counted, batch))
        return weights(model)

    assert_same(train(2), train(1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "federated"}, "SupervisedRunner().train(distributed='federated'"),
        ({"strategy": "ddpp"}, "did you mean 'ddp'"),
        ({"optimizer": None}, "pass optimizer= or optimizers="),
        ({"accumulate": 0}, "accumulate=0"),
        ({"resume": "auto"}, "pass logdir"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(given: Any, message: str) -> None:
    with pytest.raises(allhands.UserError, match=re.escape(message)):
        small(**given)


def test_loaders_that_are_not_there_are_named() -> None:
    loop, _ = small()
    with pytest.raises(allhands.UserError, match="no loader 'trian' that is trained on; did you"):
        for epoch in loop.epochs(1):
            list(epoch.batches("trian"))


def test_two_optimizers_over_one_model_are_refused() -> None:
    model = net()
    halves = {
        name: torch.optim.SGD(part.parameters(), lr=0.1)
        for name, part in zip("ab", (model[0], model[2]), strict=True)
    }
    with pytest.raises(allhands.UserError, match="train parts of one model, 'net'"):
        allhands.Loop(models={"net": model}, optimizers=halves, loaders=loaders(1))


def on_rank_0_only() -> None:
    loop, _ = small()
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            if loop.main:
                loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch)


@pytest.mark.serial
def test_a_step_on_some_ranks_only_is_named() -> None:
    with pytest.raises(allhands.UserError, match="rank 0 is at loop.step of 'optimizer', and"):
        in_world(2, on_rank_0_only)


def test_a_schedule_that_needs_a_metric_is_given_one() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def made() -> allhands.Loop:
        return allhands.Loop(
            model=model, optimizer=optimizer, scheduler=plateau, loaders=loaders(1)
        )

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    loop = made()
    with pytest.raises(allhands.UserError, match=r"write epoch\.metric ="):
        run(loop, lambda batch: loop.step(loss_of, batch))
    loop = made()
    for epoch in loop.epochs(3):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.metric = 1.0
    assert optimizer.param_groups[0]["lr"] < 0.1
    with pytest.raises(allhands.UserError, match=r"loop\.steps has no epochs"):
        next(made().steps(3))


def test_the_strategy_may_be_called_as_the_runner_calls_it() -> None:
    model = net()
    options: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert allhands.Loop(**options, distributed="single").strategy.name == "single"
    with pytest.raises(allhands.UserError, match="are one argument"):
        allhands.Loop(**options, strategy="ddp", distributed="ddp")
