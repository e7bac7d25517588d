"""Faults that are built in on purpose must be found and named, and sound trainings must not be
accused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from allhands import DDP, SupervisedRunner, current_world
from allhands.errors import UserError
from allhands.models import GPT
from allhands.strategies import Strategy
from allhands.strategies.base import Bound
from allhands.strategies.ddp_exchange import DDPExchange
from allhands.strategies.model_state import ModelState
from allhands.world import World
from tests.verify.problems import data, network, only, verified

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

# ---------------------------------------------------------------------- sound trainings


# rare: cli/test_verify.py verifies a sound training on 1 and 2.
@pytest.mark.rare
def test_a_sound_training_is_the_same_at_1_2_and_3_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Uneven last batches (53 samples), accumulation, clipping, Adam, class weights and targets
    that do not count."""
    model = network()
    report = verified(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        workers=(1, 2, 3),
        steps=12,
        accumulate=2,
        clip_norm=0.5,
        criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0])),
        loaders={
            "train": DataLoader(data(ignored=9), 4, shuffle=True),
            "valid": DataLoader(data(), 4),
        },
    )
    assert [(row.strategy, row.workers, row.verdict) for row in report.rows] == [
        ("ddp", n, "same") for n in (1, 2, 3)
    ]
    assert report.ok
    assert not report.notes
    assert all(row.times < 20 for row in report.rows if row.noise)
    assert capsys.readouterr().out.strip() == report.table().strip()
    assert {name: float(p.detach().sum()) for name, p in model.named_parameters()} == {
        name: float(p.detach().sum()) for name, p in network().named_parameters()
    }


class NextToken(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        output, target = super().handle_batch(model, batch)
        return output.transpose(1, 2), target


def test_a_gpt_with_gradients_that_are_zero_but_for_rounding_is_the_same() -> None:
    """The bias of attention keys has no gradient but rounding, and Adam makes full steps of
    that."""
    torch.manual_seed(0)
    model = GPT(vocab_size=17, block_size=8, layers=2, heads=2, width=16)
    tokens = torch.randint(17, (40, 9), generator=torch.Generator().manual_seed(3))
    report = verified(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        workers=3,
        runner=NextToken(device="cpu"),
        loaders={
            "train": DataLoader(torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]), 3)
        },
        steps=10,
    )
    assert report.ok, report.table()


# ---------------------------------------------------------------------- faults of a strategy


class ForgetsOneLayer(DDP):
    """Does not exchange the gradient of the first layer's weight."""

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        bound = super().bind(model, optimizer, world, *options)
        if isinstance(bound.exchange, DDPExchange):
            others = [pair for pair in bound.exchange.trained if pair[0] != "0.weight"]
            bound.exchange._exchanged = lambda _: others  # type: ignore[method-assign]
        return bound


def test_a_layer_whose_gradient_is_not_exchanged() -> None:
    row = only(verified(strategies=ForgetsOneLayer()))
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "gradient of 0.weight")
    assert row.difference > 0.01
    (cause,) = row.causes
    assert (
        "not exchanged: the ranks hold different weights after step 1, in 1 of 4 parameters: "
        "0.weight" in cause
    )


class AveragesOverRanks(DDP):
    """Weights each rank's gradient with 1 / world size, whatever its number of samples."""

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        factor = torch.ones(())

        def look(module: nn.Module, args: tuple[torch.Tensor]) -> None:
            total = torch.tensor(float(len(args[0])))
            dist.all_reduce(total)
            factor.copy_(total / (world.world_size * len(args[0])))

        if world.world_size > 1:
            model.register_forward_pre_hook(look)
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient * factor)
        return super().bind(model, optimizer, world, *options)


def test_gradients_averaged_over_ranks_and_not_over_samples() -> None:
    """53 samples in global batches of 12: the first four steps are even, the fifth has 3 and 2."""
    row = only(verified(strategies=AveragesOverRanks(), steps=8))
    assert (row.verdict, row.step) == ("DIFFERS", 5)
    assert row.what.startswith("gradient of ")
    (cause,) = row.causes
    assert (
        "uneven shares: step 5 is the first in which the ranks have different numbers of samples "
        "(3, 2)" in cause
    )


class KeepsBuffersApart(DDP):
    """Leaves each rank its own BatchNorm statistics."""

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        bound = super().bind(model, optimizer, world, *options)
        return replace(bound, state=ModelState(model, optimizer, world))


def with_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def normalised(**changes: Any) -> Any:
    model = with_batch_norm()
    return only(
        verified(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=4, **changes
        )
    )


def test_batch_norm_buffers_that_are_not_shared() -> None:
    row = normalised(strategies=KeepsBuffersApart())
    assert row.verdict == "DIFFERS"
    (cause,) = [text for text in row.causes if text.startswith("buffers: ")]
    assert "after step 1" in cause
    assert "1.running_mean, 1.running_var" in cause


def test_batch_norm_of_a_sound_strategy() -> None:
    row = normalised()
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 1, "loss")
    assert row.causes[0].startswith(
        "BatchNorm: with 1 in evaluation mode the difference disappears"
    )
    assert not [text for text in row.causes if text.startswith(("buffers: ", "not exchanged: "))]


# ---------------------------------------------------------------------- faults of a training


class AroundTheModule(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return super().handle_batch(getattr(model, "module", model), batch)


class Wraps(Strategy):
    """Exchanges gradients by a wrapper around the model, as PyTorch's own does."""

    name = "wraps"

    def check(self, world: World) -> None:
        pass

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        bound = super().bind(model, optimizer, world, *options)
        if world.world_size > 1:
            bound.placement.module = nn.parallel.DistributedDataParallel(model)
            bound.exchange.gradient_scale = float(world.world_size)
        return bound


def test_a_forward_pass_through_the_unwrapped_module() -> None:
    row = only(verified(strategies=Wraps(), runner=AroundTheModule(device="cpu")))
    assert (row.verdict, row.step) == ("DIFFERS", 1)
    assert row.what.startswith("gradient of ")
    assert row.causes[0].startswith(
        "unwrapped module: the ranks hold different weights after step 1, in 4 of 4 parameters"
    )


def test_what_the_training_itself_refuses_is_told_with_the_row_that_it_happened_in() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4))
    with pytest.raises(
        UserError, match="ddp with 2 workers: layer '1' is a SyncBatchNorm, which needs GPUs"
    ):
        verified(model=model)


class StepsForEachWorker(lr_scheduler.StepLR):
    """Advances once a worker, as a scheduler does that is called on every rank of some trainers."""

    def step(self, epoch: int | None = None) -> None:
        world = current_world()
        for _ in range(world.world_size if world is not None else 1):
            super().step()


def test_a_schedule_that_advances_once_a_worker() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = StepsForEachWorker(optimizer, step_size=1, gamma=0.5)
    row = only(verified(model=model, optimizer=optimizer, scheduler=(schedule, "step")))
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 2, "learning rate")
    assert row.difference == pytest.approx(0.05)
    (cause,) = row.causes
    assert cause.startswith(
        "learning rate: step 2 is taken with 0.05 by 2 workers, and with 0.1 alone. The scheduler"
    )


class Pads:
    """A sampler that repeats samples until the workers get equally many, as torch's
    DistributedSampler does."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        world = current_world()
        size = world.world_size if world is not None else 1
        order = list(range(self.samples))
        return iter(order + order[: -self.samples % size])


def test_a_last_batch_that_is_padded_with_duplicates() -> None:
    row = only(verified(loaders={"train": DataLoader(data(), 6, sampler=Pads(53))}))
    assert (row.verdict, row.step, row.what) == ("DIFFERS", 5, "number of samples")
    assert row.causes[0].startswith(
        "samples: step 5 trains 2 workers on 6 samples (by rank: 3, 3), and alone on 5: some are "
        "repeated"
    )
    assert row.causes[1].startswith(
        "sampler: the order of loader 'train' in epoch 1 is another one with 2 workers than alone"
    )
