"""Steps of which the user calls the backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import DDP
from tests.loop.own_loops import (
    assert_same,
    batches_by_hand,
    classifier_by_hand,
    contrast,
    d_loss,
    gan_loop,
    loaders,
    net,
    weights,
)
from tests.worlds import in_world


def in_windows(workers: int, accumulate: int = 2) -> list[torch.Tensor]:
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loaders={"train": loaders(workers, accumulate)["train"]},
        accumulate=accumulate,
        clip_norm=0.5,
    )
    for epoch in loop.epochs(2):
        for batch in epoch.train:
            with loop.accumulating():
                for x, y in batch.micro_batches:
                    loop.backward(F.cross_entropy(loop.model(x), y), count=len(x))
    assert loop.history["step"] == [5, 10]
    return weights(model)


def gan(workers: int, strategy: Any = None) -> list[torch.Tensor]:
    """As a script has it: two losses add up in a step of the first optimizer."""
    loop, g, d = gan_loop(workers, strategy=strategy, clip_norm=0.5)
    g_called, d_called = loop.models["g"], loop.models["d"]
    for epoch in loop.epochs(2):
        for x, _ in epoch.train:
            fake = g_called(loop.randn(len(x), 4))
            loop.backward(F.softplus(-d_called(x)).mean(), optimizer="d")
            loop.backward(F.softplus(d_called(fake.detach())).mean(), optimizer="d")
            loop.step(optimizer="d")
            loop.backward(F.softplus(-d_called(fake)).mean(), optimizer="g")
            loop.step(optimizer="g")
    assert loop.history["train"].keys() == {"d_loss", "g_loss"}
    return weights(g, d)


def gan_by_hand() -> list[torch.Tensor]:
    g, d = net(4, 6), net(6, 1, seed=1)
    of_g = torch.optim.Adam(g.parameters(), lr=0.01)
    of_d = torch.optim.SGD(d.parameters(), lr=0.1)
    for iteration, (x, _) in enumerate(batches_by_hand(2)):
        seed = allhands.data.derive_seed(42, "draw", iteration, 0, 1)
        z = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(seed))
        fake = g(z)
        for optimizer, module, loss in (
            (of_d, d, lambda: d_loss(d, x, fake)),  # noqa: B023
            (of_g, g, lambda: F.softplus(-d(fake)).mean()),  # noqa: B023
        ):
            module.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    return weights(g, d)


def contrastive(workers: int) -> list[torch.Tensor]:
    """A loss of the whole batch, and one that is a mean."""
    model = net()
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": loaders(workers)["train"]},
    )
    for epoch in loop.epochs(2):
        for x, y in epoch.train:
            output = loop.model(x)
            loop.backward(contrast(loop.gather(output)))
            loop.backward(F.cross_entropy(loop.model(x), y))
            loop.step()
    return weights(model)


def contrastive_by_hand() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches_by_hand(2):
        optimizer.zero_grad()
        (contrast(model(x)) + F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return weights(model)


def own_data(workers: int) -> list[torch.Tensor]:
    """Three losses in a step, of batches of the ranks' own: of 3 and 4, or 3, 3 and 1 samples."""
    cuts = {1: [], 2: [3], 3: [3, 6]}[workers]
    model = net()
    loop = allhands.Loop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in loop.steps(4):
        for number in range(3):
            x, y = own_batch(step.number, number)
            x, y = (tensor.tensor_split(cuts)[loop.world.rank] for tensor in (x, y))
            loop.backward(F.cross_entropy(loop.model(x), y) / 3, count=len(x))
        loop.step()
    return weights(model)


def own_batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(7, 6, generator=generator), torch.randint(0, 3, (7,), generator=generator)


def own_data_by_hand() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        optimizer.zero_grad()
        for number in range(3):
            x, y = own_batch(step, number)
            (F.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
    return weights(model)


def idle(workers: int, in_window: bool = False) -> list[torch.Tensor]:
    """Seven samples, six a step: in the second one some ranks have none."""
    model = net()
    x, y = (tensor[:7] for tensor in loaders(1)["train"].dataset.tensors)
    loop = allhands.Loop(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders={"train": DataLoader(TensorDataset(x, y), batch_size=6 // workers)},
    )
    for epoch in loop.epochs(3):
        for batch in epoch.train:
            if in_window:
                with loop.accumulating():
                    for inputs, targets in batch.micro_batches:
                        loss = F.cross_entropy(loop.model(inputs), targets)
                        loop.backward(loss, count=len(inputs))
                continue
            inputs, targets = batch
            loop.backward(F.cross_entropy(loop.model(inputs), targets))
            loop.step()
    return weights(model)


def test_one_process_is_the_loop_by_hand() -> None:
    assert_same(in_windows(1), classifier_by_hand(clip=0.5)[0])
    assert_same(gan(1), gan_by_hand())
    assert_same(own_data(1), own_data_by_hand())
    assert_same(contrastive(1), contrastive_by_hand())


def all_of_them(workers: int, accumulate: int) -> list[list[torch.Tensor]]:
    found = [in_windows(workers, accumulate), gan(workers), idle(workers)]
    found += [gan(workers, DDP(optimizer_state="sharded")), own_data(workers)]
    return [*found, contrastive(workers), idle(workers, in_window=True)]


@pytest.mark.serial
# rare on 2: 3 have uneven shares too.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_workers_are_the_loop_by_hand(workers: int) -> None:
    expected = [classifier_by_hand(clip=0.5)[0], gan_by_hand(), idle(1)]
    expected += [gan_by_hand(), own_data_by_hand(), contrastive_by_hand(), idle(1)]
    for found in in_world(workers, all_of_them, workers, 1 if workers == 3 else 2):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def small(**options: Any) -> allhands.Loop:
    model = net()
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return allhands.Loop(model=model, loaders={"train": loaders(1)["train"]}, **options)


def loss_of(loop: allhands.Loop, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(loop.model(x), y)


def test_the_forward_pass_has_the_precision_that_was_asked_for() -> None:
    loop = small(precision="bf16")
    with pytest.raises(allhands.UserError, match=r"precision='bf16' comes after the forward pass"):
        for batch in next(loop.epochs(1)).train:
            loop.backward(loss_of(loop, batch))
    loop = small(precision="bf16")
    for batch in next(loop.epochs(1)).train:
        with loop.accumulating():
            (x, _) = batch
            assert loop.model(x).dtype == torch.bfloat16
            loop.backward(loss_of(loop, batch), count=len(batch))
        break


def without_a_step(loop: allhands.Loop, batch: Any) -> None:
    loop.backward(loss_of(loop, batch))


def without_a_loss(loop: allhands.Loop, batch: Any) -> None:
    loop.step()


def without_a_count(loop: allhands.Loop, batch: Any) -> None:
    with loop.accumulating():
        loop.backward(loss_of(loop, batch))


def gathered(loop: allhands.Loop, batch: Any) -> None:
    with loop.accumulating():
        loop.backward(loop.gather(loop.model(batch[0])).mean(), count=1)


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (without_a_step, {}, r"loop\.backward was called without loop\.step\(\) after it"),
        (without_a_loss, {}, r"it was not called; call loop\.backward\(loss\), or"),
        (without_a_count, {}, r"write .* loop\.backward\(loss, count=len\(x\)\)"),
        (without_a_step, {"accumulate": 2}, r"does not know what the loss is a mean of"),
        (gathered, {}, r"loop\.gather in loop\.accumulating, where ranks may"),
        (without_a_step, {"strategy": "local_sgd"}, r"'local_sgd', which takes part in the passes"),
    ],
)
def test_what_would_be_another_gradient_is_refused(
    body: Any, options: dict[str, Any], message: str
) -> None:
    loop = small(**options)
    with pytest.raises(allhands.UserError, match=message):
        for epoch in loop.epochs(1):
            for batch in epoch.train:
                body(loop, batch if loop.settings.accumulate == 1 else next(batch.micro_batches))


@pytest.mark.parametrize(("count", "message"), [(None, "does not know what"), (4, "without loop")])
def test_no_loss_is_lost_behind_the_batches(count: int | None, message: str) -> None:
    loop = small()
    with pytest.raises(allhands.UserError, match=message):
        for epoch in loop.epochs(1):
            for batch in epoch.train:
                loop.backward(loss_of(loop, batch))
                loop.step()
                x, y = batch
            loop.backward(F.cross_entropy(loop.model(x), y), count)
