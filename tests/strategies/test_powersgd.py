"""PowerSGD: its arithmetic in one process, trainings against a loop by hand, and what an
interruption changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allhands import DDP, Callback
from allhands.data import derive_seed
from allhands.step.exchange import Exchange
from allhands.step.loss import NonFiniteLossError
from allhands.strategies.base import Bound
from allhands.strategies.ddp_exchange import DDPExchange
from allhands.strategies.powersgd import PowerSGD
from tests.reference import relative_difference
from tests.runner.problems import StopAt
from tests.strategies.workers_by_hand import (
    Gradients,
    Poisoned,
    exact,
    network,
    train,
    train_by_hand,
)
from tests.worlds import in_world


def alone(rank: int, *shapes: tuple[int, ...]) -> PowerSGD:
    """In a world of one, whose sums are what is summed."""
    named = [(str(number), nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]
    world: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    return PowerSGD(rank, 0, 42, named, world)


def approximated(state: PowerSGD, *gradients: torch.Tensor) -> list[torch.Tensor]:
    flat = {str(number): gradient.flatten().clone() for number, gradient in enumerate(gradients)}
    state._approximate(flat)
    return [
        value.view_as(gradient) for value, gradient in zip(flat.values(), gradients, strict=True)
    ]


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(
        rank, columns, generator=generator
    )


def test_what_has_the_rank_is_exact() -> None:
    for rank, held in (
        (1, 1),
        (2, 2),
        (4, 4),
        (4, 1),
    ):  # of the last, three columns have no direction of their own
        matrix = low_rank(24, 40, held)
        (found,) = approximated(alone(rank, (24, 40)), matrix)
        assert float((found - matrix).norm() / matrix.norm()) < 1e-5, (rank, held)


def test_vectors_and_small_matrices_travel_whole() -> None:
    gradients = [
        torch.randn(64),
        torch.randn(3, 3),
        torch.randn(()),
        torch.randn(0, 5),
        torch.randn(16, 4, 3, 3),
    ]
    state = alone(1, *(tuple(gradient.shape) for gradient in gradients))
    *whole, compressed = approximated(state, *gradients)
    assert all(
        torch.equal(found, gradient) for found, gradient in zip(whole, gradients, strict=False)
    )
    assert torch.linalg.matrix_rank(compressed.view(16, 36)) == 1


def test_nothing_is_lost_but_late() -> None:
    state, given, sent = alone(1, (16, 16)), torch.zeros(16, 16), torch.zeros(16, 16)
    for step in range(60):
        gradient = low_rank(16, 16, 4, seed=step)
        given += gradient
        sent += approximated(state, gradient)[0]
    assert torch.allclose(sent + state.own_tensors()["left/0"].view(16, 16), given, atol=1e-3)
    assert float((given - sent).norm() / given.norm()) < 0.5


def test_gradients_of_zero_come_back_and_nan_is_not_hidden() -> None:
    state, matrix = alone(2, (16, 16)), low_rank(16, 16, 1)
    assert not approximated(state, torch.zeros(16, 16))[0].any()
    assert torch.allclose(approximated(state, matrix)[0], matrix, atol=1e-4)
    matrix[3, 5] = float("nan")
    assert approximated(state, matrix)[0].isnan().all()


class ByHand:
    """By projection on the space that the basis spans, which does not depend on the basis."""

    def __init__(self, rank: int, start: int, workers: int) -> None:
        self.rank, self.start, self.steps = rank, start, 0
        self.left = [
            {name: torch.zeros_like(p) for name, p in network().named_parameters()}
            for _ in range(workers)
        ]
        self.factors: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: list[Gradients]) -> Gradients:
        self.steps += 1
        mean = exact(gradients)
        if self.steps <= self.start:
            return mean
        gradients = [
            {name: value * len(gradients) for name, value in own.items()} for own in gradients
        ]
        for name in mean:
            rows, columns = mean[name].shape if mean[name].dim() == 2 else (1, 1)
            if 2 * self.rank * (rows + columns) > rows * columns:
                continue
            wanted = [
                own[name] + left[name] for own, left in zip(gradients, self.left, strict=True)
            ]
            whole = torch.stack(wanted).mean(0).double()
            if name not in self.factors:
                generator = torch.Generator().manual_seed(derive_seed(42, "powersgd", name))
                self.factors[name] = torch.randn(columns, self.rank, generator=generator).double()
            basis, _ = torch.linalg.qr(whole @ self.factors[name])
            self.factors[name] = whole.T @ basis
            mean[name] = (basis @ self.factors[name].T).float()
            for left, own in zip(self.left, wanted, strict=True):
                left[name] = own - mean[name]
        return mean


def trained(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    workers = dist.get_world_size()
    for rank, start in ((1, 0), (2, 3)):
        by_hand = train_by_hand(workers, ByHand(rank, start, workers)).state_dict()
        ours = train(DDP(compress={"name": "powersgd", "rank": rank, "start": start})).state_dict()
        found[f"by hand {rank}"] = relative_difference(ours, by_hand)
        found[f"from exact {rank}"] = relative_difference(ours, train(DDP()).state_dict())
    options: dict[str, Any] = {
        "compress": {"name": "powersgd", "start": 2},
        "bucket_cap_mb": 0.002,
    }  # a few buckets
    whole = train(DDP(**options), callbacks=[Callback()])
    for where, shorter in (
        ("middle", {"callbacks": [StopAt(5)]}),
        ("end", {"epochs": 2, "callbacks": [Callback()]}),
    ):
        logdir = f"{folder}/{workers}-{where}"
        train(DDP(**options), logdir=logdir, **shorter)
        again = train(DDP(**options), logdir=logdir, resume="auto", callbacks=[Callback()])
        found[where] = all(
            torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True)
        )
    with pytest.raises(NonFiniteLossError) as error:
        train(DDP(compress={"name": "powersgd", "start": 0}), criterion=Poisoned(3))
    found["nan"] = str(error.value)
    return found


kept: list[Exchange] = []


class Kept(DDP):
    """Keeps the exchange of its training."""

    def bind(self, *given: Any) -> Bound:
        bound = super().bind(*given)
        kept.append(bound.exchange)
        return bound


def gone_on(folder: str) -> dict[str, Any]:
    """Three workers go on from what two have saved after step 5."""
    train(
        Kept(compress={"name": "powersgd", "start": 2}),
        logdir=f"{folder}/three",
        resume=f"{folder}/2-middle",
        epochs=1,
        callbacks=[Callback()],
    )
    (exchange,) = kept
    assert isinstance(exchange, DDPExchange)
    assert isinstance(exchange._coded, PowerSGD)
    return {"exchanges": exchange._coded.exchanges, "left": exchange.own_tensors()}


@pytest.mark.serial
def test_trained_the_same_as_by_hand_and_resumed_to_the_bit(tmp_path: Path) -> None:
    for workers in (3, 2):
        for found in in_world(workers, trained, str(tmp_path)):
            assert found["by hand 1"] < 1e-5
            assert found["by hand 2"] < 1e-5
            assert found["from exact 1"] > 1e-3
            assert found["middle"]
            assert found["end"]
            assert "rank 1" in found["nan"]
    for found in in_world(3, gone_on, str(tmp_path)):
        assert found["exchanges"] > 5


def test_what_was_left_over_keeps_its_part_of_the_mean() -> None:
    state = alone(1, (16, 16))
    state.world.world_size = 3
    # Of two ranks, added up.
    state.load_own_tensors({"left/0": torch.full((256,), 2.0), "ranks": torch.tensor(2.0)})
    # 2 / 2 ranks == 3 / 3 ranks.
    assert torch.equal(state.own_tensors()["left/0"], torch.full((256,), 3.0))
