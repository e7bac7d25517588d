"""What collectives send, as PyTorch hands them to a backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from allhands.comm.traffic import Collective
from tests.traffic_counter import TrafficCounter
from tests.worlds import in_world


def counted() -> list[tuple[str, int, int]]:
    one, four = torch.ones(10), torch.ones(20)
    with TrafficCounter() as traffic:
        dist.all_reduce(one)
        dist.broadcast(one, 0)
        dist.all_gather([torch.empty(10) for _ in range(2)], one)
        dist.all_gather_object([None, None], "text")
        (dist.send if dist.get_rank() == 0 else dist.recv)(one, 1 - dist.get_rank())
        dist.all_to_all_single(torch.empty(20), four)
        functional.wait_tensor(functional.all_reduce(one, "sum", dist.group.WORLD))
        one.requires_grad_().sum().backward()
        dist.barrier()
    found = [(one.kind, one.payload, one.size) for one in traffic.transfers]
    return [one for one in found if one[1] >= 40]


def test_payloads() -> None:
    first, second = in_world(2, counted)
    assert first[:3] == [("all_reduce", 40, 2), ("broadcast", 40, 2), ("all_gather", 80, 2)]
    assert first[-3:] == [("send", 40, 2), ("all_to_all", 80, 2), ("all_reduce", 40, 2)]
    assert second[-3] == ("recv", 40, 2)


@pytest.mark.parametrize(
    ("kind", "sent", "received"),
    [
        ("all_reduce", 150, 150),
        ("all_gather", 75, 75),
        ("reduce_scatter", 75, 75),
        ("broadcast", 75, 75),
        ("send", 100, 0),
        ("recv", 0, 100),
    ],
)
def test_bytes_by_a_ring(kind: str, sent: float, received: float) -> None:
    transfer = Collective(kind, 100, 4)
    assert (transfer.sent, transfer.received) == (sent, received)
