"""The same on GPUs, over nccl: operations, and a training whose gradients travel on a stream of
their own."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import allhands.horovod.torch as hvd
from allhands.errors import UserError
from allhands.horovod import engine
from allhands.launch import spawn
from tests.horovod.torch.optimizer_training import (
    batches,
    by_hand,
    loss_of,
    model,
    optimizers,
    weights,
)
from tests.horovod.torch.refusals import failed
from tests.horovod.torch.rounds_worlds import STEPS, Counted
from tests.patience import patience

pytestmark = [pytest.mark.gpu(2), pytest.mark.serial]


def operations() -> dict[str, Any]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = torch.arange(4.0, device="cuda") + rank
    found: dict[str, Any] = {"device": x.device.index == hvd.local_rank()}
    found["average"] = hvd.allreduce(x)
    found["bf16"] = hvd.allreduce(x.bfloat16(), op=hvd.Sum)
    found["fused"] = [hvd.allreduce_async(x * n, name=f"n{n}", op=hvd.Sum) for n in range(5)]
    found["fused"] = [hvd.synchronize(handle) for handle in reversed(found["fused"])][::-1]
    found["rows"] = hvd.allgather(torch.full((rank + 1, 2), rank, device="cuda"))
    found["root"] = hvd.broadcast(x, 1)
    found["dealt"], _ = hvd.alltoall(torch.arange(3, device="cuda") + 10 * rank, splits=[1, 2])
    found["scattered"] = hvd.reducescatter(torch.arange(4.0, device="cuda"), op=hvd.Sum)
    found["adasum"] = hvd.allreduce(torch.eye(2, device="cuda")[rank], op=hvd.Adasum)
    found["on the CPU"] = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    found["objects"] = hvd.allgather_object(rank)
    try:
        hvd.allreduce(torch.ones(1, device=f"cuda:{(rank + 1) % size}"), name="elsewhere")
    except UserError as error:
        found["elsewhere"] = str(error)
    # Freed at once: the operation must not read what comes to lie there.
    for number in range(50):
        own = torch.full((2**18,), float(number), device="cuda")
        handle = hvd.allreduce_async_(own, name="freed", op=hvd.Sum)
        del own
        torch.full((2**18,), -1.0, device="cuda")
        assert hvd.synchronize(handle).eq(2 * number).all(), number
    hvd.shutdown()
    moved = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }
    return {**moved, "fused": [value.cpu() for value in found["fused"]]}


def test_operations() -> None:
    for rank, found in enumerate(spawn(operations, workers=2)):
        assert found["device"]
        assert found["average"].tolist() == [0.5, 1.5, 2.5, 3.5]
        assert found["bf16"].tolist() == [1.0, 3.0, 5.0, 7.0]
        assert [value.tolist() for value in found["fused"]] == [
            [n * x for x in (1.0, 3.0, 5.0, 7.0)] for n in range(5)
        ]
        assert found["rows"].tolist() == [[0, 0], [1, 1], [1, 1]]
        assert found["root"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert found["dealt"].tolist() == [[0, 10], [1, 2, 11, 12]][rank]
        assert found["scattered"].tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
        assert found["adasum"].tolist() == [1.0, 1.0]
        assert found["on the CPU"].tolist() == [2.0, 2.0]
        assert found["objects"] == [0, 1]
        assert "call torch.cuda.set_device(hvd.local_rank())" in found["elsewhere"]


def train(data: Any, **options: Any) -> tuple[list[torch.Tensor], int]:
    """The weights after this rank's batches, ``data(rank)``, and how many parts of rounds it has
    begun."""
    counted = Counted()
    hvd.init()
    net = model().cuda()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizers("sgd", net), named_parameters=net.named_parameters(), **options
    )
    for images, labels in data(hvd.rank()):
        optimizer.zero_grad()
        loss_of(net, (images.cuda(), labels.cuda())).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    hvd.shutdown()
    return [value.cpu() for value in weights(net)], counted.number


@pytest.mark.parametrize("op", ["Average", "ActiveAverage"])
def test_uneven_data_with_join_trains_as_one_process_does(op: str) -> None:
    for found, _ in spawn(train, (batches,), {"op": op}, workers=2):
        for own, other in zip(found, by_hand(2, "sgd", op), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


def many_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(rank)
    sizes = [4 + (rank + number) % 3 for number in range(STEPS + 5 * rank)]
    return [
        (torch.randn(size, 6, generator=made), torch.randint(3, (size,), generator=made))
        for size in sizes
    ]


@pytest.mark.parametrize("compressed", [False, True])
def test_rounds_train_as_one_process_does(compressed: bool) -> None:
    net = model()
    optimizer = optimizers("sgd", net)
    data = [many_batches(rank) for rank in range(2)]
    for step in range(max(map(len, data))):
        optimizer.zero_grad()
        for own in data:
            if step < len(own):
                (loss_of(net, own[step]) / 2).backward()
        optimizer.step()
    tolerance = 5e-2 if compressed else 1e-4
    options = {
        "compression": hvd.Compression.bf16 if compressed else hvd.Compression.none,
        "groups": 3,
    }
    for found, begun in spawn(train, (many_batches,), options, workers=2):
        assert begun > 3 * (STEPS - 10)
        for own, other in zip(found, weights(net), strict=True):
            torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


def broken_promise() -> tuple[str, float]:
    """Rank 1 begins a backward pass after many steps and does not end it; rank 0's GPU waits for
    it."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "7"
    hvd.init()
    net = model().cuda()
    optimizer = hvd.DistributedOptimizer(optimizers("sgd", net), net.named_parameters(), groups=3)
    images, labels = (value.cuda() for value in batches(0)[0])

    def step() -> None:
        optimizer.zero_grad()
        loss_of(net, (images, labels)).backward()
        optimizer.step()

    for _ in range(STEPS):
        step()
    began = time.monotonic()
    if hvd.rank() == 1:
        net[4](torch.ones(1, 16, device="cuda")).sum().backward()
        while not engine.current()._broken and time.monotonic() < began + 60:
            time.sleep(0.05)
    else:
        step()
        torch.cuda.synchronize()
    text = failed(lambda: hvd.allreduce(torch.ones(1, device="cuda")))
    took = time.monotonic() - began
    hvd.shutdown()
    return text, took


def test_a_step_that_one_rank_does_not_end_is_an_error_and_no_hang() -> None:
    for text, took in spawn(broken_promise, workers=2):
        assert "all ranks began it" in text
        assert "rank 1 did not end it" in text
        assert took < patience(60)


def norm() -> torch.Tensor:
    hvd.init()
    layer = hvd.SyncBatchNorm(3).cuda()
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).cuda()
    out = layer(x[: 2 + 2 * hvd.rank()] if hvd.rank() == 0 else x[2:])
    gathered = hvd.allgather(out.detach())
    hvd.shutdown()
    return gathered.cpu()


def test_batch_norm_over_all_ranks() -> None:
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    for found in spawn(norm, workers=2):
        torch.testing.assert_close(found, nn.BatchNorm1d(3)(x).detach(), atol=1e-5, rtol=1e-4)
