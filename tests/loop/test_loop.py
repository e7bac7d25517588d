"""`allhands.Loop`: steps that the user writes, on any number of workers."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands.data import derive_seed
from allhands.data.order import global_order
from tests.worlds import in_world

# The last global batch has 5 samples: with three workers one of them has one.
SAMPLES, GLOBAL = 53, 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def net(inputs: int = 6, outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def loaders(workers: int, accumulate: int = 1) -> dict[str, Any]:
    size = GLOBAL // workers // accumulate
    return {
        "train": DataLoader(data(), batch_size=size, shuffle=True),
        "valid": DataLoader(data(), batch_size=7),
    }


def batches_by_hand(epochs: int, seed: int = 42) -> Any:
    x, y = data().tensors
    for epoch in range(epochs):
        for part in global_order(SAMPLES, seed, epoch).split(GLOBAL):
            yield x[part], y[part]


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- one optimizer


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


def classifier_by_hand(clip: float | None = None) -> tuple[list[torch.Tensor], list[float]]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches_by_hand(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()) * len(x))
    return weights(model), losses


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


# ---------------------------------------------------------------------- several optimizers


def noise(iteration: int, step: int, rows: int) -> torch.Tensor:
    """What `Loop.randn` draws first in a step function, for a whole batch."""
    seed = derive_seed(42, "draw", iteration, step, 1)
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def d_loss(d: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()


def contrast(rows: torch.Tensor) -> torch.Tensor:
    return (rows @ rows.t()).logsumexp(1).mean()


# For the models that `net` makes.
SLICES = allhands.Tensor(plan={"0": "colwise", "2": "rowwise"})


def gan_loop(shares: int, **options: Any) -> tuple[allhands.Loop, nn.Module, nn.Module]:
    """The loop of a generator and a discriminator, and these."""
    g, d = net(4, 6), net(6, 1, seed=1)
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.Adam(g.parameters(), lr=0.01),
            "d": torch.optim.SGD(d.parameters(), lr=0.1),
        },
        loaders={"train": loaders(shares)["train"]},
        **options,
    )
    return loop, g, d


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


# ---------------------------------------------------------------------- by steps


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


# ---------------------------------------------------------------------- batches of one's own


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


# ---------------------------------------------------------------------- resume


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Left(Exception):
    pass


def train_and_leave(folder: Path, leave_at: int | None) -> Any:
    g, d = net(4, 6), net(6, 1, seed=1)
    loop = allhands.Loop(
        models={"g": g, "d": d},
        optimizers={
            "g": torch.optim.Adam(g.parameters(), lr=0.01),
            "d": torch.optim.Adam(d.parameters(), lr=0.01),
        },
        loaders={"train": loaders(1)["train"]},
        logdir=folder,
        save_every=3,
        resume="auto",
    )
    counter = Counter()
    loop.register("counter", counter)
    loop.register("own", counter, each_rank=True)

    def of_d(batch: Any) -> torch.Tensor:
        return d_loss(loop.models["d"], batch[0], loop.models["g"](loop.randn(len(batch[0]), 4)))

    def of_g(batch: Any) -> torch.Tensor:
        z = torch.randn(len(batch[0]), 4)  # from the global generator
        return F.softplus(-loop.models["d"](loop.models["g"](z))).mean()

    for epoch in loop.epochs(3):
        for batch in epoch.train:
            loop.step(of_d, batch, optimizer="d")
            loop.step(of_g, batch, optimizer="g")
            counter.count += 1
            if counter.count == leave_at:
                raise Left
    return weights(g, d), counter.count, loop.history["train"]


@pytest.mark.parametrize("leave_at", [4, 5, 8])
def test_a_loop_goes_on_to_the_bit(tmp_path: Path, leave_at: int) -> None:
    expected, count, history = train_and_leave(tmp_path / "whole", None)
    with pytest.raises(Left):
        train_and_leave(tmp_path / "cut", leave_at)
    found, again, resumed = train_and_leave(tmp_path / "cut", None)
    assert all(map(torch.equal, found, expected))
    assert again == count
    assert resumed == history


# ---------------------------------------------------------------------- bad input


def small(**given: Any) -> tuple[allhands.Loop, nn.Module]:
    model = net()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **given}
    return allhands.Loop(model=model, loaders=loaders(1), **given), model


def run(loop: allhands.Loop, body: Callable[[Any], None]) -> None:
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            body(batch)


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


def train_on_shards(workers: int) -> Any:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        # The last global batch of each loader has one sample.
        loaders={
            "train": DataLoader(data(), batch_size=26 // workers, shuffle=True),
            "valid": DataLoader(data(), batch_size=52 // workers),
        },
        strategy="fsdp" if workers > 1 else None,
    )

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(loop.model(batch[0]), batch[1])

    for epoch in loop.epochs(2):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)
    return weights(model), loop.history["valid"]["loss"]


@pytest.mark.serial
def test_a_rank_without_a_sample_calls_the_model_with_the_others() -> None:
    expected, losses = train_on_shards(1)
    for found, measured in in_world(2, train_on_shards, 2):
        assert_same(found, expected)
        assert measured == pytest.approx(losses, abs=1e-5)


def train_on_three_samples(workers: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(6, 3))
    x, y = (part[:3] for part in data().tensors)
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, y), batch_size=4 // workers)},
        strategy="fsdp" if workers > 1 else None,
    )
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch))
    return weights(model)


@pytest.mark.serial
def test_ranks_with_other_numbers_of_samples_call_shards_equally_often() -> None:
    expected = train_on_three_samples(1)
    for found in in_world(2, train_on_three_samples, 2):
        assert_same(found, expected)


def test_sigterm_saves_and_the_loop_goes_on(tmp_path: Path) -> None:
    def train(folder: Path, kill_at: int | None) -> list[torch.Tensor]:
        model = net()
        loop = allhands.Loop(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loaders=loaders(1),
            logdir=folder,
            resume="auto",
        )
        for epoch in loop.epochs(3):
            for batch in epoch.train:
                loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch)
                if loop.global_step == kill_at:
                    os.kill(os.getpid(), signal.SIGTERM)
        return weights(model)

    expected = train(tmp_path / "whole", None)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "cut", 7)
    assert left.value.code == 128 + signal.SIGTERM
    assert all(map(torch.equal, train(tmp_path / "cut", None), expected))


def test_the_strategy_may_be_called_as_the_runner_calls_it() -> None:
    model = net()
    options: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert allhands.Loop(**options, distributed="single").strategy.name == "single"
    with pytest.raises(allhands.UserError, match="are one argument"):
        allhands.Loop(**options, strategy="ddp", distributed="ddp")


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


def call_the_plain_model(strategy: Any) -> None:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy=strategy,
    )
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch))


def average_the_plain_model() -> None:
    model = net()
    allhands.Loop(
        models={"model": model, "average": torch.optim.swa_utils.AveragedModel(model)},
        optimizers={"model": torch.optim.SGD(model.parameters(), lr=0.1)},
        loaders=loaders(2),
        strategy="fsdp",
    )


@pytest.mark.serial
def test_a_model_of_which_a_copy_is_trained_is_not_used_itself() -> None:
    in_world(2, call_the_plain_model, "ddp")
    for strategy in ("fsdp", SLICES):
        with pytest.raises(allhands.UserError, match=r"parts of a copy of it; call loop\.model"):
            in_world(2, call_the_plain_model, strategy)
    with pytest.raises(allhands.UserError, match="models has 'average', an AveragedModel, and"):
        in_world(2, average_the_plain_model)


def train_halves(strategy: Any) -> Any:
    """One optimizer over two models."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    loop = allhands.Loop(
        models={"first": first, "second": second},
        optimizers={"both": torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)},
        loaders={"train": loaders(1)["train"]},
        strategy=strategy,
    )

    def loss_of(batch: Any) -> torch.Tensor:
        hidden = loop.models["first"](batch[0]).tanh()
        return F.cross_entropy(loop.models["second"](hidden), batch[1])

    run(loop, lambda batch: loop.step(loss_of, batch))
    return weights(first, second)


@pytest.mark.serial
def test_an_optimizer_over_two_models_trains_both_in_slices() -> None:
    plan = {"first": "colwise", "second": "rowwise"}
    for found in in_world(2, train_halves, allhands.Tensor(plan=plan)):
        assert_same(found, train_halves(None))


class Parts:
    """What a rank has of the parameters, as DTensors."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = [p.detach() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is not saved")


def save_parts(folder: Path, each_rank: bool) -> None:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=loaders(2),
        strategy="fsdp",
        logdir=folder,
    )
    loop.register("parts", Parts(loop.model), each_rank=each_rank)
    run(loop, lambda batch: loop.step(lambda b: F.cross_entropy(loop.model(b[0]), b[1]), batch))


@pytest.mark.serial
@pytest.mark.parametrize("each_rank", [False, True])
def test_parts_of_tensors_are_not_saved_as_a_state(tmp_path: Path, each_rank: bool) -> None:
    with pytest.raises(allhands.UserError, match=r"is a DTensor, .* keep its to_local\(\)"):
        in_world(2, save_parts, tmp_path, each_rank)
