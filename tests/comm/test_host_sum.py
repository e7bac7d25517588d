"""Sums of small tensors over the ranks of one host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allhands
from allhands.comm import host_sum as module
from allhands.comm.host_sum import HostSum, host_sum
from allhands.errors import WorldError
from tests.traffic_counter import TrafficCounter
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def met() -> tuple[int, HostSum]:
    world = allhands.current_world()
    assert world is not None
    found = host_sum(world)
    assert found is not None
    assert host_sum(world) is found
    return world.rank, found


def number(rank: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(rank)
    return torch.randn(1001, generator=drawn, dtype=torch.float64).to(dtype)


def sums() -> dict[str, Any]:
    rank, links = met()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        flat = number(rank, dtype)
        links.add_up(flat)
        found[str(dtype)] = flat.view(torch.uint8).numpy().tobytes()
    with TrafficCounter() as counter:
        links.add_up(torch.zeros(3))
    (transfer,) = counter.transfers
    return found | {
        "told": (transfer.kind, transfer.payload, transfer.size),
        "takes": [links.takes(torch.empty(size)) for size in (1, 1 << 14, (1 << 14) + 1)],
    }


def test_ranks_add_up_in_their_order_and_have_the_same_bits() -> None:
    first, *others = in_world(3, sums)
    assert all(other == first for other in others)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        expected = number(0, dtype) + number(1, dtype) + number(2, dtype)
        assert first[str(dtype)] == expected.view(torch.uint8).numpy().tobytes()
    assert first["told"] == ("all_reduce", 12, 3)
    assert first["takes"] == [True, True, False]


def many() -> list[float]:
    _, links = met()
    flat = torch.full((1 << 14,), 1.0)
    for _ in range(50):  # the largest there are: no rank may wait for one that waits itself
        links.add_up(flat.fill_(1.0))
    return flat[[0, -1]].tolist()


def test_largest_messages_follow_one_another() -> None:
    assert in_world(4, many) == [[4.0, 4.0]] * 4


def failing(way: str) -> str:
    rank, links = met()
    if way == "late":
        for link in links._links.values():
            link.settimeout(0.2)
    dist.barrier()
    try:
        if way == "other" or rank != 1:
            links.add_up(torch.zeros(2 if rank == 1 else 3))
        elif way == "gone":
            links.close()
    except WorldError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_a_rank_that_is_gone_is_named() -> None:
    first, second, third = in_world(3, failing, "gone")
    assert not second
    assert "Connection closed by peer: rank" in first
    assert "Connection closed by peer: rank" in third


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second = in_world(2, failing, "late")
    assert not second
    assert first == "rank 1 did not take part in a sum of small tensors within 0 s"


def test_ranks_in_other_calls_are_told() -> None:
    first, second = in_world(2, failing, "other")
    assert "rank 0 adds up 12 bytes in sum 1" in first
    assert "rank 1 8 bytes in sum 1" in first
    assert "rank 1 adds up 8 bytes in sum 1" in second


def left_to_gloo() -> list[bool]:
    world = allhands.current_world()
    assert world is not None
    several_hosts = host_sum(dataclasses.replace(world, local_world_size=1))
    module.listen_unix = cannot if world.rank == 0 else module.listen_unix  # type: ignore
    return [several_hosts is None, host_sum(world) is None]


def cannot(name: str) -> None:
    raise OSError("no such kind of socket")


def test_all_ranks_leave_it_to_gloo_where_one_cannot_be_reached() -> None:
    assert in_world(2, left_to_gloo) == [[True, True]] * 2
