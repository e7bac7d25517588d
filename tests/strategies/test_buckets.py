"""The exchange of gradients in buckets, eager and where steps are captured: the same training, on
gloo workers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allhands
from allhands import DDP, UserError, WorldError
from allhands.comm.host_sum import host_sum
from allhands.strategies.buckets import Buckets, _grouped
from allhands.world import connections, group
from tests.function_graphs import captured_on_processors
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.test_ddp import train
from tests.worlds import in_world


def with_capture(run: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run with steps captured as on a GPU, where a graph is the function itself; what it returns,
    and how many steps were replayed."""
    with captured_on_processors() as graphs:
        result = run(*args)
    return result, sum(one.replays for one in graphs)


def tall() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)
    ).double()  # AdamW makes much of the rounding of small gradients


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(83, 6, generator=drawn, dtype=torch.float64)
    return x, torch.randint(4, (83,), generator=drawn)


def small_buckets() -> dict[str, torch.Tensor]:
    model = tall()
    train(
        model,
        samples(),
        4,
        nn.CrossEntropyLoss(),
        strategy=DDP(bucket_cap_mb=0.002),
        epochs=3,
        accumulate=2,
        clip_norm=0.5,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    # They are left alone in the end.
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return model.state_dict()


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_many_buckets_with_micro_batches_and_clipping() -> None:
    model = tall()
    batches = global_batches(83, 16, seed=0, shuffle=False)
    train_by_hand(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        samples(),
        batches,
        18,
        clip_norm=0.5,
    )
    (first, replays), (second, _) = in_world(2, with_capture, small_buckets)
    assert replays > 5
    assert relative_difference(first, model.state_dict()) < 1e-7
    assert all(torch.equal(first[name], second[name]) for name in first)


def broken() -> None:
    x, y = samples()
    x[64 + 5] = float("nan")  # in the last step, in the share of rank 1
    train(tall(), (x, y), 4, nn.CrossEntropyLoss(), epochs=1)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_loss_that_is_not_finite_ends_the_training_on_all_ranks() -> None:
    with pytest.raises(UserError, match="loss is nan on rank 1"):
        in_world(2, broken)


class CountsOnOne(nn.Linear):
    """Its steps cannot be captured on rank 1."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += dist.get_rank()
        return super().forward(x)


def one_is_eager() -> dict[str, torch.Tensor]:
    model = nn.Sequential(tall(), nn.Tanh(), CountsOnOne(4, 4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(
        model,
        samples(),
        4,
        nn.CrossEntropyLoss(),
        epochs=6,
        optimizer=optimizer,
        strategy=DDP(check_weights_every=1),
    )
    return model.state_dict()


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_rank_whose_steps_cannot_be_recorded_keeps_the_weights_of_the_others() -> None:
    (first, replays), (second, none) = in_world(2, with_capture, one_is_eager)
    assert replays > 20
    assert not none
    assert all(torch.equal(first[name], second[name]) for name in first)


def orders() -> tuple[list[float], list[float]]:
    """Gradients made in another order on each rank."""
    world = allhands.current_world()
    assert world is not None
    weights = [nn.Parameter(torch.full((3,), float(n + 1))) for n in range(4)]
    buckets = Buckets([(str(n), weight) for n, weight in enumerate(weights)], world, cap_mb=1e-6)
    total = torch.zeros(())
    for weight in weights if world.rank else reversed(weights):
        total = total + (weight * (world.rank + 1)).sum() * float(weight.detach()[0])
    total.backward()
    buckets.finish()
    spoiled = [weight.grad.tolist() for weight in weights]  # type: ignore[union-attr]
    for weight in weights:
        weight.grad = None
    dist.barrier()
    buckets.spoil()
    return spoiled, [float(weight.grad.sum()) for weight in weights]  # type: ignore[union-attr]


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_ranks_that_make_gradients_in_another_order_exchange_alike() -> None:
    for found, spoiled in in_world(2, orders):
        assert found == [[3.0 * (n + 1)] * 3 for n in range(4)]
        assert all(math.isnan(value) for value in spoiled)


def some_unused() -> list[list[float] | None]:
    """Gradients of three parameters: rank 0 makes the first, rank 1 the first and the second,
    nobody the third."""
    world = allhands.current_world()
    assert world is not None
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    buckets = Buckets([(str(n), weight) for n, weight in enumerate(weights)], world)
    found: list[Any] = []
    for _ in range(2):  # a step leaves nothing behind for the next one
        for weight in weights:
            weight.grad = None
        sum((weight * (world.rank + 1)).sum() for weight in weights[: world.rank + 1]).backward()  # type: ignore[union-attr]
        buckets.finish()
        found = [None if weight.grad is None else weight.grad.tolist() for weight in weights]
    return found


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_gradient_that_a_rank_has_not_made_is_zero_and_one_that_nobody_has_stays_none():
    for found in in_world(2, some_unused):
        assert found == [[3.0, 3.0], [2.0, 2.0], None]


def made_twice() -> str:
    world = allhands.current_world()
    assert world is not None
    weight = nn.Parameter(torch.ones(2))
    buckets = Buckets([("weight", weight)], world)
    try:
        for _ in range(2):
            (weight * 2).sum().backward()
    except UserError as error:
        return str(error)
    finally:
        buckets.finish()
    return ""


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_gradient_that_is_made_again_after_it_was_exchanged_is_refused() -> None:
    for message in in_world(2, made_twice):
        assert "the gradient of 'weight' was made again after it was exchanged" in message
        assert "use_reentrant=False" in message


def aborted_meanwhile() -> str:
    world, state = allhands.current_world(), group.state()
    assert world is not None
    assert state is not None
    os.environ[connections.ELASTIC] = "1"
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    aborted: list[bool] = []
    state.is_aborted = lambda: bool(aborted)
    buckets = Buckets([("first", first), ("second", second)], world)
    try:
        (first * second).sum().backward()
        buckets.finish()
        aborted.append(True)
        (first * second).sum().backward()
    except WorldError as error:
        return str(error)
    finally:
        del os.environ[connections.ELASTIC]
        buckets.close()
    return ""


def test_a_backward_pass_ends_once_the_group_is_aborted() -> None:
    for message in in_world(1, aborted_meanwhile):
        assert "the process group was aborted, as a worker is lost" in message


def test_buckets_are_cut_where_they_are_full_and_have_one_dtype() -> None:
    mb = 2**18
    sizes = [
        (mb, torch.float32),
        (mb // 2, torch.float32),
        (mb, torch.float64),
        (mb // 2, torch.float32),
        (2 * mb, torch.float32),
    ]
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size, dtype in sizes]
    found = _grouped(parameters, 1.0)
    assert [[id(p) for p in group] for group in found] == [
        [id(parameters[i]) for i in group] for group in ([4], [3, 1], [2], [0])
    ]


def by_size(host: bool) -> tuple[list[int], list[bytes]]:
    """How many all-reduces gloo was asked for in a backward pass, and the gradients."""
    world = allhands.current_world()
    assert world is not None
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 30))
    buckets = Buckets(
        list(model.named_parameters()), world, cap_mb=0.01, small=host_sum(world) if host else None
    )
    asked, plain = [], dist.all_reduce

    def counted(flat: torch.Tensor, **options: Any) -> Any:
        asked.append(flat.nbytes)
        return plain(flat, **options)

    dist.all_reduce = counted  # type: ignore[assignment]
    model(torch.randn(8, 300)).sum().backward()
    buckets.finish()
    return asked, [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_small_buckets_go_past_gloo_with_the_same_bits() -> None:
    (asked, gradients), second = in_world(2, by_size, True)
    (asked_all, by_gloo), _ = in_world(2, by_size, False)
    assert second[1] == gradients == by_gloo
    assert len(asked) < len(asked_all)
    assert all(size > 1 << 16 for size in asked)
