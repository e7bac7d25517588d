"""What three ranks call in the worlds of test_ops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import allhands.horovod.torch as hvd
from allhands.horovod import engine
from tests.horovod.torch.refusals import failed
from tests.refusals import refused

SIZE = 3
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.uint8,
    torch.int64,
    torch.float64,
)


def reductions() -> dict[str, Any]:
    rank = hvd.rank()
    x = torch.arange(4.0) + rank
    found: dict[str, Any] = {
        str(op): hvd.allreduce(x, op=op)
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    }
    found["scaled"] = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    found["old average"] = hvd.allreduce(x, average=False)
    found["whole"] = hvd.allreduce(torch.tensor([rank, 2 * rank - 5]))
    found["bool"] = hvd.allreduce(torch.tensor([rank == 1, False]), op=hvd.Sum)
    for dtype in DTYPES:
        found[str(dtype)] = hvd.allreduce(torch.tensor([[rank + 1]], dtype=dtype), op=hvd.Sum)
    found["fp16 on the way"] = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    found["bf16 on the way"] = hvd.allreduce(x / 3, op=hvd.Sum, compression=hvd.Compression.bf16)
    found["group"] = hvd.grouped_allreduce([x, torch.tensor(rank), x.double()], op=hvd.Sum)
    inplace, pair = x.clone(), [x.clone(), x.clone().view(2, 2)]
    assert hvd.allreduce_(inplace, op=hvd.Sum) is inplace
    hvd.grouped_allreduce_(pair, op=hvd.Max)
    found["in place"] = [inplace, *pair]
    found["x"] = x
    return found


def other_order() -> list[Any]:
    """Each rank calls in another order, and waits in a third."""
    calls = ["a", "b", "c", "d"]
    mine = calls[hvd.rank() :] + calls[: hvd.rank()]
    handles = {
        name: hvd.allreduce_async(torch.full((2,), float(ord(name))), name=name, op=hvd.Sum)
        for name in mine
    }
    results = {name: hvd.synchronize(handles[name]) for name in reversed(mine)}
    return [results[name] for name in calls] + [
        all(hvd.poll(handle) for handle in handles.values())
    ]


def rows() -> dict[str, Any]:
    rank = hvd.rank()
    found: dict[str, Any] = {"gathered": hvd.allgather(torch.full((rank, 2), rank))}
    found["group"] = hvd.grouped_allgather(
        [torch.ones(1, dtype=torch.bool), torch.tensor([1j * rank])]
    )
    found["broadcast"] = hvd.broadcast(torch.tensor([rank, 7 * rank]), root_rank=2)
    own = torch.tensor(float(rank))
    hvd.broadcast_(own, 1)
    found["in place"] = own
    found["dealt"] = hvd.alltoall(torch.arange(6).view(6, 1) + 10 * rank)
    found["split"] = hvd.alltoall(torch.arange(4) + 10 * rank, splits=torch.tensor([1, 3, 0]))
    found["scattered"] = hvd.reducescatter(torch.arange(4.0) + rank, op=hvd.Sum)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 3]]), torch.tensor([1.0, 3.0]), (4,), check_invariants=True
    )
    handle = hvd.sparse_allreduce_async(sparse, name="s", op=hvd.Average)
    found["sparse"] = hvd.synchronize(handle).to_dense()
    assert torch.equal(handle().to_dense(), found["sparse"]), "Horovod's handle is a function"
    none = torch.as_strided(torch.zeros(1), (0,), (0,))  # as NumPy's empty arrays come
    found["none"] = hvd.allgather(torch.ones(2) if rank == 1 else none)
    objects = hvd.allgather_object({"rank": rank, "numbers": np.arange(rank), "raw": bytes(rank)})
    found["objects"] = [
        (entry["rank"], entry["numbers"].tolist(), len(entry["raw"])) for entry in objects
    ]
    found["object"] = hvd.broadcast_object(
        [1, ("a", None), {2.5: True}] if rank == 1 else None, root_rank=1
    )
    return found


def gradients() -> dict[str, Any]:
    rank, found = hvd.rank(), {}
    for name, call in {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Average),
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall,
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        "mean scattered": hvd.reducescatter,
        "group": lambda x: sum(
            part.sum() for part in hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
        ),
    }.items():
        x = torch.ones(3, requires_grad=True)
        (call(x) * (rank + 1)).sum().backward()
        found[name] = x.grad
    return found


def sets() -> dict[str, Any]:
    rank, found = hvd.rank(), {}
    outer = hvd.add_process_set([0, 2])
    found["ids"] = hvd.get_process_set_ids_and_ranks()
    if outer.included():
        found["sum"] = hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=outer)
        found["gathered"] = hvd.allgather(torch.tensor([rank]), process_set=outer)
        found["root"] = hvd.broadcast(torch.tensor(rank), 2, process_set=outer)
        found["place"] = (outer.rank(), outer.size())
        hvd.barrier(outer)
        found["outsider"] = refused(lambda: hvd.broadcast(torch.tensor(rank), 1, process_set=outer))
    else:
        found["not in it"] = refused(lambda: hvd.allreduce(torch.tensor(rank), process_set=outer))
    found["twice"] = refused(lambda: hvd.add_process_set([2, 0]))
    found["differs"] = failed(lambda: hvd.add_process_set([0, 1] if rank else [1, 2]))
    found["removed"] = (
        hvd.remove_process_set(outer),
        hvd.remove_process_set(outer),
        outer.process_set_id,
    )
    return found


def disagreements() -> dict[str, str]:
    rank = hvd.rank()
    odd = rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(torch.ones(4 if odd else 3), name="shape"),
        "dtype": lambda: hvd.allreduce(
            torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="dtype"
        ),
        "op": lambda: hvd.allreduce(torch.ones(3), name="op", op=hvd.Max if odd else hvd.Sum),
        "root": lambda: hvd.broadcast(torch.ones(3), 1 if odd else 0, name="root"),
        "rows": lambda: hvd.allgather(torch.ones(2, 4 if odd else 3), name="rows"),
    }
    found = {name: failed(call) for name, call in calls.items()}
    found["parameters"] = failed(
        lambda: hvd.broadcast_parameters({"w": torch.ones(2 + odd), "v": torch.ones(1)})
    )
    found["twice"] = hvd.broadcast_object(twice() if rank == 0 else "")
    if rank != 0:
        hvd.allreduce(torch.ones(2), name="twice")
    found["object"] = refused(lambda: hvd.broadcast_object(_Unknown() if rank == 0 else None))
    # All that went wrong went wrong on all ranks, so that they can go on.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == SIZE
    return found


def twice() -> str:
    """What rank 0 is told before any other rank has begun its part."""
    hvd.allreduce_async(torch.ones(2), name="twice")
    return refused(lambda: hvd.allreduce_async(torch.ones(2), name="twice"))


class _Unknown:
    pass


def uneven_calls() -> tuple[list[float], list[float], int, float]:
    """Rank r makes r + 1 calls, and joins."""
    averages, of_those_left = [], []
    for _ in range(hvd.rank() + 1):
        averages.append(hvd.allreduce(torch.ones(1)).item())
        of_those_left.append(hvd.allreduce(torch.ones(1), op=hvd.ActiveAverage).item())
    last = hvd.join()
    return averages, of_those_left, last, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def everything() -> dict[str, Any]:
    with pytest.raises(ValueError, match=r"use hvd.init\(\) first"):
        hvd.allreduce(torch.ones(1))
    hvd.init()
    hvd.init()
    queries = (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_homogeneous(),
    )
    parts = (reductions, other_order, rows, gradients, sets, disagreements, uneven_calls)
    found = {part.__name__: part() for part in parts}
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()  # elastic scripts do
    again = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return {**found, "queries": queries, "again": again}


def lonely_call() -> tuple[str, float]:
    """Rank 1 never comes to the others' call."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "1.5"
    hvd.init()
    began = time.monotonic()
    text = ""
    if hvd.rank() == 1:
        deadline = began + 30
        while not engine.current()._broken and time.monotonic() < deadline:
            time.sleep(0.05)
        text = failed(lambda: hvd.allreduce(torch.ones(1), name="late"))
    else:
        text = failed(lambda: hvd.allreduce(torch.ones(1), name="loss"))
    took = time.monotonic() - began
    hvd.shutdown()
    return text, took


def gone() -> str:
    hvd.init()
    if hvd.rank() == 0:
        hvd.shutdown()
        return ""
    text = failed(lambda: hvd.allreduce(torch.ones(1), name="loss"))
    hvd.shutdown()
    return text


def adasum() -> list[torch.Tensor]:
    hvd.init()
    rank = hvd.rank()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    result = hvd.grouped_allreduce(
        [x[rank], torch.eye(4)[rank], torch.full((2,), 3.0)], op=hvd.Adasum
    )
    hvd.shutdown()
    return result
