from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import allhands
from allhands.comm import (
    all_gather_ragged,
    all_gather_rows,
    all_gather_text,
    all_reduce_sum,
    broadcast_bytes,
    broadcast_ints,
    broadcast_new,
    broadcast_tensors,
    collectives,
    mean_buffers,
    sum_gradients,
)
from allhands.errors import WorldError
from allhands.world import World
from tests.worlds import in_world


def here() -> World:
    world = allhands.current_world()
    assert world is not None
    return world


def everything() -> dict[str, object]:
    world = here()
    rank = world.rank
    summed = [
        torch.tensor([1.0, 2.0]) * (rank + 1),
        torch.tensor(rank, dtype=torch.int64),
        torch.tensor([0.5], dtype=torch.float64),
    ]
    all_reduce_sum(summed, world)
    told = [torch.full((2, 2), float(rank)), torch.tensor([rank == 0])]
    broadcast_tensors(told, world, source=0)
    mean = [torch.tensor([float(rank)])]
    mean_buffers(mean, world)
    return {
        "sum": [value.tolist() for value in summed],
        "told": [value.tolist() for value in told],
        "mean": mean[0].tolist(),
        "ints": broadcast_ints([3, 1, 2**40] if rank == 0 else None, world),
        "no ints": broadcast_ints([] if rank == 0 else None, world),
        "rows": [part.tolist() for part in all_gather_rows(torch.full((rank, 2), rank), world)],
        "flags": [part.tolist() for part in all_gather_rows(torch.ones(rank) > 0, world)],
        "none": [list(part.shape) for part in all_gather_rows(torch.ones(0, 3), world)],
        "text": all_gather_text("" if rank == 0 else f"rang {rank} ä", world),
    }


@pytest.mark.serial
def test_three_ranks_say_the_same_things() -> None:
    for found in in_world(3, everything):
        assert found == {
            "sum": [[6.0, 12.0], 3, [1.5]],
            "told": [[[0.0, 0.0], [0.0, 0.0]], [True]],
            "mean": [1.0],
            "ints": [3, 1, 2**40],
            "no ints": [],
            "rows": [[], [[1, 1]], [[2, 2], [2, 2]]],
            "flags": [[], [True], [True, True]],
            "none": [[0, 3]] * 3,
            "text": ["", "rang 1 ä", "rang 2 ä"],
        }


def text_on_rank_0() -> str:
    if here().rank == 0:
        with pytest.raises(WorldError) as raised:
            all_gather_text("words", here())
        return str(raised.value)
    all_gather_rows(torch.arange(9, dtype=torch.uint8), here())
    return ""


@pytest.mark.serial
def test_what_is_no_text_is_not_taken_for_text() -> None:
    told, _ = in_world(2, text_on_rank_0)
    assert told.startswith(
        "rank 0 exchanges text with the others, and rank 1 sent something else: it is in another "
        "call."
    )


def test_a_world_of_one_is_left_alone() -> None:
    alone = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
    value = torch.tensor([2.0])
    all_reduce_sum([value], alone)
    broadcast_tensors([value], alone)
    assert value.tolist() == [2.0]
    assert broadcast_ints([1, 2], alone) == [1, 2]
    assert all_gather_text("x", alone) == ["x"]


def some_gradients() -> list[list[float] | None]:
    world = here()
    used_by_all, used_by_one, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    used_by_all.grad = torch.ones(2)
    if world.rank == 1:
        used_by_one.grad = torch.tensor([2.0, 3.0])
    sum_gradients([used_by_all, used_by_one, unused], world)
    return [None if p.grad is None else p.grad.tolist() for p in (used_by_all, used_by_one, unused)]


@pytest.mark.serial
def test_gradients_of_idle_ranks_count_as_zero_and_unused_ones_stay_none() -> None:
    assert in_world(2, some_gradients) == [[[2.0, 2.0], [2.0, 3.0], None]] * 2


def told_by_rank_1() -> dict[str, object]:
    world = here()
    forms = [
        ([2, 3], torch.float32),
        ([], torch.float64),
        ([0, 4], torch.float32),
        ([5], torch.bfloat16),
        ([7_000_000], torch.float32),  # more than travels together
        ([4], torch.bool),
    ]
    given = None
    if world.rank == 1:
        given = [
            torch.arange(6.0).view(2, 3),
            torch.tensor(0.1, dtype=torch.float64),
            torch.empty(0, 4),
            torch.full((5,), 0.5, dtype=torch.bfloat16),
            torch.arange(7_000_000.0),
            torch.tensor([True, False, True, True]),
        ]
    versions = [one._version for one in given or ()]
    found = broadcast_new(given, forms, world, 1)
    return {
        "forms": [(list(one.shape), one.dtype) for one in found] == forms,
        "small": [found[number].tolist() for number in (0, 1, 3, 5)],
        "large": torch.equal(found[4], torch.arange(7_000_000.0)),
        "untouched": versions == [one._version for one in given or ()],
        "bytes": broadcast_bytes(b"said" if world.rank == 1 else b"", world, 1).decode(),
        "no bytes": broadcast_bytes(b"", world, 1).decode(),
    }


def test_tensors_of_other_devices_travel_with_those_of_the_worlds(monkeypatch):
    sent = []
    monkeypatch.setattr(collectives.dist, "broadcast", lambda flat, *_: sent.append(flat))
    world = SimpleNamespace(world_size=2, rank=0, device=torch.device("meta"))
    given = [torch.tensor(3.0), torch.ones(2, device="meta")]
    broadcast_new(given, [([], torch.float32), ([2], torch.float32)], world, 0)
    assert [(len(flat), flat.device.type) for flat in sent] == [(12, "meta")]


def test_tensors_of_one_rank_are_made_on_the_others():
    for found in in_world(3, told_by_rank_1):
        assert found == {
            "forms": True,
            "small": [
                [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
                0.1,
                [0.5] * 5,
                [True, False, True, True],
            ],
            "large": True,
            "untouched": True,
            "bytes": "said",
            "no bytes": "",
        }


def ragged() -> list[list[torch.Tensor]]:
    world = here()
    own = [torch.full((n, 2), float(world.rank)) for n in range(world.rank + 1)]
    own += [torch.tensor(True), torch.arange(3, dtype=torch.int16)] if world.rank == 1 else []
    return all_gather_ragged(own, world)


@pytest.mark.serial
def test_lists_of_other_lengths_are_gathered():
    for found in in_world(3, ragged):
        assert [len(own) for own in found] == [1, 4, 3]
        assert [list(item.shape) for item in found[2]] == [[0, 2], [1, 2], [2, 2]]
        assert found[1][2].item() is True
        assert found[1][3].dtype == torch.int16
        assert found[1][3].tolist() == [0, 1, 2]
        assert found[2][2].tolist() == [[2.0, 2.0]] * 2


def one_text() -> None:
    world = here()
    all_gather_ragged(["text"] if world.rank else [torch.ones(1)], world)  # type: ignore[list-item]


@pytest.mark.serial
def test_what_is_no_tensor_is_refused_on_all_ranks():
    with pytest.raises(Exception, match="holds what is no tensor"):
        in_world(2, one_text)
