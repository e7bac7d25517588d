"""Training whose gradients travel as rounds computes what one process does; what changes after many
equal steps is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.horovod.torch.rounds_worlds import (
    CASES,
    SIZE,
    STEPS,
    Three,
    always,
    broken_promise,
    by_hand,
    everything,
    inputs,
    left_out_by_all,
    left_out_once,
    uneven,
)
from tests.patience import patience
from tests.worlds import in_world

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return in_world(SIZE, everything)


def same(found: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_changes_after_many_equal_steps_is_computed_as_in_one_process(
    case: Any, world: list[dict[str, Any]]
) -> None:
    wanted = by_hand(case, (0, 1, 2), STEPS + 10)
    for found, left in (rank[case.__name__] for rank in world):
        same(found, wanted)
        assert left > 3 * (STEPS - 10), "the buckets left by their names"


def test_options(world: list[dict[str, Any]]) -> None:
    for found in world:
        same(found["fp16"], by_hand(left_out_by_all, (0, 1, 2), STEPS + 10), 5e-2)
        same(found["predivided"], by_hand(left_out_once, (0, 1, 2), STEPS + 10))
        same(found["two passes"], by_hand(always, (0, 1, 2), STEPS + 10))
    assert all(found["min"] == world[0]["min"] for found in world)


def test_ranks_that_join_after_many_steps(world: list[dict[str, Any]]) -> None:
    net = Three()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(STEPS + 6):
        optimizer.zero_grad()
        for rank in range(3):
            for name in uneven(rank, step):
                (((getattr(net, name) - inputs(rank, step)) ** 2).sum() / 3).backward()
        optimizer.step()
    for found, last in (rank["join"] for rank in world):
        assert last == 2
        same(found, [param.tolist() for param in net.parameters()])


def test_a_process_set_has_rounds_of_its_own(world: list[dict[str, Any]]) -> None:
    wanted = by_hand(always, (0, 2), STEPS + 10)
    for rank in (0, 2):
        same(world[rank]["set"], wanted)
        assert world[rank]["in the set"] > 3 * (STEPS - 10)
    assert world[1]["in the set"] == 0


def test_a_shape_that_changes_on_one_rank_is_an_error_on_all(world: list[dict[str, Any]]) -> None:
    for text, after in (rank["shape"] for rank in world):
        assert "'b'" in text
        assert (
            "ranks 0, 2 gave shape [2], rank 1 gave shape [5]; all ranks must give the same" in text
        )
        assert after == 3.0


def test_parameters_that_come_later_travel_too(world: list[dict[str, Any]]) -> None:
    for found in (rank["more"] for rank in world):
        # Ten steps of 0.1 times the mean of 0, 1, 2.
        torch.testing.assert_close(torch.tensor(found), torch.tensor([-1.0]))


def test_two_optimizers_whose_steps_overlap(world: list[dict[str, Any]]) -> None:
    net = Three()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        for rank in range(3):
            (
                sum((param - inputs(rank, step)).square().sum() for param in net.parameters()) / 3
            ).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found in (rank["two"] for rank in world):
        same(found, [param.tolist() for param in net.parameters()] * 2)


def test_a_gradient_that_becomes_sparse_stays_so(world: list[dict[str, Any]]) -> None:
    steps = STEPS + 10
    for sparse, table in (rank["sparse"] for rank in world):
        assert [step for step in range(steps) if sparse[step]] == [STEPS, STEPS + 1, STEPS + 2]
        wanted = [[1 - 0.1 * steps / 3] * 2] * 3 + [[1.0] * 2] + [[1 - 0.1 * steps] * 2]
        torch.testing.assert_close(torch.tensor(table), torch.tensor(wanted), atol=1e-5, rtol=0)


def test_names_in_another_order_after_many_steps_and_another_shape(
    world: list[dict[str, Any]],
) -> None:
    for found in (rank["names"] for rank in world):
        assert found["order"] == found["after"] == [3.0 * ord(name) for name in "xyz"]
        assert "allreduce 'x': ranks 0, 1 gave shape [2], rank 2 gave shape [3]" in found["shape"]


def test_join_before_the_step_is_refused(world: list[dict[str, Any]]) -> None:
    assert all("join() between backward() and step()" in rank["busy"] for rank in world)


def test_another_engine_begins_anew(world: list[dict[str, Any]]) -> None:
    for found, left in (rank["again"] for rank in world):
        same(found, by_hand(always, (0, 1, 2), 10))
        assert left == 3 * 7


@pytest.mark.parametrize("dies", [False, True])
def test_a_step_that_one_rank_does_not_end_is_an_error_and_no_hang(
    dies: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    # A rank that leaves may have done so before the others promised.
    why = "has called shutdown()" if dies else "and 2 more of its round: all ranks began it"
    for rank, (text, took) in enumerate(in_world(SIZE, broken_promise, dies)):
        if dies and rank == 1:
            continue
        assert "allreduce 'gradients.0.a'" in text
        assert why in text
        assert "rank 1" in text
        assert took < patience(30)
