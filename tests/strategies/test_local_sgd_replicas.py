"""Logical workers of `local_sgd`, several of them on one rank; with real losses in
tests/launch/test_elastic_local_sgd.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import allhands
from allhands.errors import WorldError
from allhands.strategies.base import BindOptions
from allhands.strategies.local_sgd import LocalSGD
from tests.worlds import in_world

REPLICAS, STEPS, EVERY = 5, 8, 3


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(step: int, number: int) -> torch.Tensor:
    """Replicas have other numbers of samples, so that weights of the mean show."""
    return torch.randn(3 + number, 4, generator=torch.Generator().manual_seed(100 * step + number))


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :2]).square().mean()


def by_hand() -> dict[str, torch.Tensor]:
    """Five workers, each with a model of its own, brought together after every third step."""
    model, _ = made()
    models = [copy.deepcopy(model) for _ in range(REPLICAS)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in models]
    seen = [0] * REPLICAS
    means: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        for number, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = batch(step, number)
            optimizer.zero_grad()
            loss_of(one, x).backward()
            optimizer.step()
            seen[number] += len(x)
        means = {
            name: sum(
                (
                    n * dict(one.named_parameters())[name].detach()
                    for n, one in zip(seen, models, strict=True)
                ),
                torch.zeros(()),
            )
            / sum(seen)
            for name, _ in model.named_parameters()
        }
        if (step + 1) % EVERY == 0:
            for one in models:
                for name, parameter in one.named_parameters():
                    parameter.data.copy_(means[name])
            seen = [0] * REPLICAS
    for name in ("2.running_mean", "2.running_var"):
        means[name] = torch.stack([one.state_dict()[name] for one in models]).mean(0)
    return means


def together(lost: int | None, with_copy: bool = True) -> Any:
    """What three ranks come to, where one of them loses its replicas after step 5."""
    world = allhands.current_world()
    assert world is not None
    model, optimizer = made()
    bound = LocalSGD(every=EVERY).bind(model, optimizer, world, BindOptions(replicas=REPLICAS))
    exchange: Any = bound.exchange
    exchange.begin(0)
    replicas = exchange.replicas

    def take(x: Any, *_: Any) -> None:
        optimizer.zero_grad()
        if len(x):
            loss_of(model, x).backward()
        exchange.exchange_all(len(x), len(x), None, False)
        exchange.after_step(len(x))

    for step in range(STEPS):
        parts = [(batch(step, number),) for number in sorted(replicas.held)]
        replicas.take(take, parts, 0, lambda number, step=step: take(batch(step, number)))
        replicas.end_step()
        replicas.commit()
        if step == 4 and lost is not None:
            replicas.stash()
            if world.rank == lost:
                replicas.held.clear()
            if not with_copy:
                replicas._copy.others.clear()
            replicas.lose(done=False)
            try:
                replicas.deal(0)
            except WorldError as error:
                return str(error)
            exchange.begin(step + 1)
    bound.state.sync_buffers()
    return sorted(replicas.held), model.state_dict()


@pytest.mark.parametrize("lost", [None, 1])
def test_ranks_train_several_replicas_as_so_many_workers_would(lost: int | None) -> None:
    found = in_world(3, together, lost)
    assert [held for held, _ in found] == [[0, 1], [2, 3], [4]]
    means = by_hand()
    for _, state in found:
        for name, mean in means.items():
            torch.testing.assert_close(state[name], mean, rtol=1e-4, atol=1e-6, msg=name)


def test_a_rank_without_a_replica_takes_part() -> None:
    found = in_world(6, together, None)
    assert [held for held, _ in found] == [[0], [1], [2], [3], [4], []]
    for _, state in found:
        for name, mean in by_hand().items():
            torch.testing.assert_close(state[name], mean, rtol=1e-4, atol=1e-6, msg=name)


def test_what_both_ranks_have_lost_is_named() -> None:
    found = in_world(3, together, 1, False)
    assert all("worker 2 of local_sgd was lost" in said for said in found)
