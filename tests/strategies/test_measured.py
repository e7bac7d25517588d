"""Sizes of buckets that are measured: the choice, what it leaves alone, and that a resumed training
keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import allhands
from allhands import DDP, Callback, SupervisedRunner, UserError
from allhands.step.exchange import Exchange
from allhands.strategies.base import BindOptions, Bound
from allhands.strategies.measured import backward_of, candidates_for, fastest, said
from allhands.world import World
from tests.runner.problems import classification
from tests.worlds import in_world


def test_sizes_that_lay_the_gradients_out_alike_are_tried_once() -> None:
    mb = 2**20
    assert candidates_for(mb // 2) == [None]
    assert candidates_for(3 * mb) == [None, 1, 5]
    assert candidates_for(20 * mb) == [None, 1, 5]
    assert candidates_for(30 * mb) == candidates_for(900 * mb) == [None, 1, 5, 100]


def test_the_choice_in_words() -> None:
    times = {None: 0.0021, 1: 0.0032, 5: 0.0021}
    assert said(5, times) == "bucket_cap_mb=5 (measured: 1: 3.2 ms, 5: 2.1 ms, 25: 2.1 ms)"
    assert (
        said(None, times)
        == "bucket_cap_mb=None, which is 25 (measured: 1: 3.2 ms, 5: 2.1 ms, 25: 2.1 ms)"
    )
    assert said(None, {}).startswith(
        "bucket_cap_mb=None, which is 25 (not measured: all gradients are less than 1 MB"
    )


def test_the_backward_pass_is_from_all_outputs() -> None:
    first, second, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    backward_of({"a": first * 2, "b": (second * 3, torch.arange(2))})
    assert first.grad is not None
    assert second.grad is not None
    assert (first.grad.tolist(), second.grad.tolist(), unused.grad) == ([2, 2], [3, 3], None)


@pytest.mark.parametrize("cap", [0, -1, True, "fast", float("inf"), float("nan")])
def test_sizes_that_there_are_not(cap: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"bucket_cap_mb=.*it must be a positive number of MB, such as 25, or 'measured'",
    ):
        DDP(bucket_cap_mb=cap)


class Normalised(nn.Module):
    """With statistics and dropout, and 1.3 MB of gradients. Says how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(5, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(512, 600),
            nn.ReLU(),
            nn.Linear(600, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return self.layers(x)


calls: list[int] = []


class Kept(DDP):
    """Keeps the exchange of its last training."""

    def bind(self, *given: Any) -> Bound:
        bound = super().bind(*given)
        self.exchange = bound.exchange
        return bound


def train(cap: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Exchange]:
    model, strategy = Normalised(), Kept(bucket_cap_mb=cap)
    options = {
        "num_epochs": 2,
        "loaders": {"train": DataLoader(classification(50), 5, shuffle=True)},
    } | options
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        distributed=strategy,
        verbose=False,
        **options,
    )
    return {**model.state_dict()}, strategy.exchange


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(classification(50))


class Inner(SupervisedRunner):
    """Does not call the model that it is given."""

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return torch.zeros(len(batch[0]), 4), batch[1]


def by_own_buckets(world: Any) -> tuple[float, list[str]]:
    """Of steps that may be recorded: the largest difference of a gradient from the mean of the
    ranks' in bf16."""
    model, strategy = Normalised().eval(), DDP(bucket_cap_mb="measured", compress="bf16")
    x = classification(50).tensors[0][world.rank :: world.world_size]
    options = BindOptions(try_on=lambda module, _: module(x))
    exchange = strategy.bind(model, torch.optim.SGD(model.parameters()), world, options).exchange
    exchange.begin(0)
    model(x).square().mean().backward()
    exchange.complete(False, False)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    exchange.finish()
    model.zero_grad()
    model(x).square().mean().backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        own = parameter.grad.bfloat16().float()
        dist.all_reduce(own)
        worst = max(worst, float((own.bfloat16().float() - found[name]).abs().max()))
    return worst, list(exchange.notes)


def chosen_by_a_clock(world: World) -> tuple[float | None, dict[float | None, float]]:
    """The choice, and the times, of steps that move a clock and compute nothing."""
    # 1 is the fastest on rank 0 alone, and a step takes as long as that of the slowest rank.
    seconds = {None: 0.05, 1: 0.08 if world.rank else 0.01, 5: 0.03, 100: 0.0301}
    now = 0.0

    def step_of(cap: float | None) -> Callable[[], None]:
        def step() -> None:
            nonlocal now
            now += seconds[cap]

        return step

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: now)
        patch.setattr("allhands.strategies.measured.time", clock)
        return fastest(step_of, [None, 1, 5, 100], world)


def measured(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    world = allhands.current_world()
    assert world is not None
    found["chosen"], found["times"] = chosen_by_a_clock(world)
    found["own buckets"], found["notes of own buckets"] = by_own_buckets(world)
    weights, exchange = train("measured", logdir=f"{folder}/whole", callbacks=[Callback()])
    found["notes"] = exchange.notes
    tried, chosen = len(calls), exchange.state_dict()["bucket_cap_mb"]
    by_name, _ = train(chosen)
    found["same"] = all(torch.equal(value, by_name[key]) for key, value in weights.items())
    train("measured", logdir=f"{folder}/parts", num_epochs=1, callbacks=[Callback()])
    before = len(calls)
    again, exchange = train(
        "measured", logdir=f"{folder}/parts", resume="auto", callbacks=[Callback()]
    )
    found["calls"] = (tried, len(calls) - before)
    found["resumed"] = all(torch.equal(value, again[key]) for key, value in weights.items())
    found["notes of the resumed"] = exchange.notes
    with pytest.raises(UserError) as error:
        train("measured", loaders={"train": DataLoader(Stream(), 5)})
    found["stream"] = str(error.value)
    model = Normalised()
    with pytest.raises(UserError) as error:
        Inner(device="cpu").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            num_epochs=1,
            distributed=DDP(bucket_cap_mb="measured"),
            verbose=False,
            loaders={"train": DataLoader(classification(50), 5)},
        )
    found["inner"] = str(error.value)
    return found


@pytest.mark.serial
def test_the_same_choice_on_all_ranks_and_nothing_else_is_changed(tmp_path: Path) -> None:
    for found in in_world(2, measured, str(tmp_path)):
        assert found["chosen"] == 5
        assert found["times"] == pytest.approx({None: 0.05, 1: 0.08, 5: 0.03, 100: 0.0301})
        assert found["own buckets"] == 0
        assert "(measured: 1: " in found["notes of own buckets"][0]
        (note,) = found["notes"]
        assert note.startswith("bucket_cap_mb=")
        assert "(measured: 1: " in note
        assert found["same"]
        assert found["resumed"]
        tried, resumed = found["calls"]
        assert resumed == 5  # the steps of the second epoch: nothing was measured again
        assert tried > 10 + 3 * 6
        assert found["notes of the resumed"][0].endswith("(measured before the checkpoint)")
        assert "is a stream" in found["stream"]
        assert found["stream"].endswith("set bucket_cap_mb to 25")
        assert "handle_batch did not call the model" in found["inner"]
