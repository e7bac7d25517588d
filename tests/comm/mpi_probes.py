"""What the tests of the mpi backend run in every rank of one mpiexec: many probes, and what came of
each as JSON in a file.

    mpiexec -n 3 python -m tests.comm.mpi_probes FOLDER

A probe raises when something is wrong. All ranks run all probes in the same order. No probe needs
more than a few ms.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import allhands
from allhands.comm.mpi import buffers

RANK = SIZE = 0
PROBES: dict[str, Callable[[], Any]] = {}
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
OPERATIONS = tuple(
    getattr(ReduceOp, name)
    for name in ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def probe(function: Callable[[], Any]) -> Callable[[], Any]:
    PROBES[function.__name__] = function
    return function


def data(rank: int, count: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, other ones on each rank, exact in any dtype."""
    numbers = (torch.arange(count) * (rank + 2) + rank) % 7 + 1
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


def everybody(count: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [data(rank, count, dtype) for rank in range(SIZE)]


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except allhands.AllhandsError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"  # noqa: PT017
        return
    raise AssertionError(f"not refused: {words}")


def reduced(op: Any, dtype: torch.dtype) -> torch.Tensor:
    """Computed by hand, in 64 bits."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([tensor.to(wide) for tensor in everybody(dtype=dtype)])
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        total = stacked.sum(0)
        if op == ReduceOp.AVG:
            total = total / SIZE if dtype.is_floating_point else total // SIZE
        return (total > 0) if dtype == torch.bool else total.to(dtype)
    if op == ReduceOp.PRODUCT:
        return stacked.prod(0).to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (stacked.amin(0) if op == ReduceOp.MIN else stacked.amax(0)).to(dtype)
    total = stacked[0]
    for other in stacked[1:]:
        total = (
            total & other
            if op == ReduceOp.BAND
            else total | other
            if op == ReduceOp.BOR
            else total ^ other
        )
    return total.to(dtype)


@probe
def all_reduce_of_every_dtype_and_operation() -> int:
    cases = 0
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        for op in (
            ReduceOp.SUM,
            ReduceOp.AVG,
            ReduceOp.PRODUCT,
            ReduceOp.MIN,
            ReduceOp.MAX,
            ReduceOp.BAND,
            ReduceOp.BOR,
            ReduceOp.BXOR,
        ):
            tensor = data(RANK, dtype=dtype)
            bits = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
            if bits and dtype.is_floating_point:
                refused(lambda: dist.all_reduce(tensor, op), "whole numbers", str(dtype))  # noqa: B023
            elif op == ReduceOp.AVG and dtype == torch.bool:
                refused(lambda: dist.all_reduce(tensor, op), "AVG")  # noqa: B023
            elif op == ReduceOp.AVG and dtype in (torch.uint16, torch.uint32, torch.uint64):
                continue  # torch cannot divide these
            else:
                dist.all_reduce(tensor, op)
                expected = reduced(op, dtype)
                rounds = op == ReduceOp.AVG and dtype.is_floating_point
                if rounds:
                    torch.testing.assert_close(
                        tensor, expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0
                    )
                else:
                    equal(tensor, expected)
                cases += 1
    assert cases > 60
    return cases


@probe
def half_precision_is_summed_in_float32() -> None:
    # 2048 + 1 + … in float16 would stay 2048.
    tensor = torch.full((3,), 2048.0 if RANK == 0 else 1.0, dtype=torch.float16)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((3,), float(torch.tensor(2048.0 + SIZE - 1)), dtype=torch.float16))


@probe
def shapes_and_strides() -> None:
    for make in (
        lambda rank: data(rank, 24).view(4, 6).t(),
        lambda rank: data(rank, 24)[::3],
        lambda rank: data(rank, 24)[1:],
        lambda rank: data(rank, 1)[0],
        lambda rank: data(rank, 24).view(2, 3, 4).permute(2, 0, 1),
        lambda rank: data(rank, 0),
        lambda rank: data(rank, 0).view(0, 4),
    ):
        tensor = make(RANK)
        before = tensor.stride()
        dist.all_reduce(tensor)
        equal(tensor, sum(make(rank) for rank in range(SIZE)))  # type: ignore[arg-type]
        assert tensor.stride() == before
        tensor = make(RANK)
        dist.broadcast(tensor, SIZE - 1)
        equal(tensor, make(SIZE - 1))
        parts = [torch.empty_like(make(0)) for _ in range(SIZE)]
        dist.all_gather(parts, make(RANK))
        for rank, part in enumerate(parts):
            equal(part, make(rank))
    whole = torch.zeros(2, 6)
    whole[:, 1::2] = RANK + 1.0
    dist.all_reduce(whole[:, 1::2])
    assert whole[:, ::2].abs().sum() == 0
    assert bool((whole[:, 1::2] == SIZE * (SIZE + 1) / 2).all())


@probe
def complex_and_bool() -> None:
    def make(rank: int) -> torch.Tensor:
        return torch.complex(data(rank), data(rank) * 2)

    for dtype in (torch.complex64, torch.complex128):
        tensor = make(RANK).to(dtype)
        dist.all_reduce(tensor)
        equal(tensor, sum(make(rank).to(dtype) for rank in range(SIZE)))  # type: ignore[arg-type]
        parts = [torch.empty(5, dtype=dtype) for _ in range(SIZE)]
        dist.group.WORLD.allgather([parts], [make(RANK).to(dtype).conj()]).wait()
        equal(
            torch.stack(parts),
            torch.stack([make(rank).to(dtype).conj().resolve_conj() for rank in range(SIZE)]),
        )
    group = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    refused(lambda: group.allreduce([make(RANK)], options), "complex")
    refused(lambda: group.allreduce([make(RANK).conj()]), "conjugated", "resolve_conj()")
    parts = [torch.empty(5, dtype=torch.bool) for _ in range(SIZE)]
    dist.all_gather(parts, data(RANK, dtype=torch.bool))
    for rank, part in enumerate(parts):
        equal(part, data(rank, dtype=torch.bool))


@probe
def any_dtype_moves() -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = data(RANK, dtype=dtype)
        dist.broadcast(tensor, 0)
        equal(tensor.to(torch.float32), data(0, dtype=dtype).to(torch.float32))


@probe
def in_pieces() -> None:
    """Several pieces and a rest, of odd sizes."""
    moves = dist.group.WORLD.channels[0].moves
    whole = moves.piece_bytes, moves.reduced_bytes
    moves.piece_bytes = moves.reduced_bytes = 64
    try:
        count = 203
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            tensor = data(RANK, count, dtype)
            dist.all_reduce(tensor)
            equal(tensor, sum(t.to(torch.int64) for t in everybody(count, dtype)).to(dtype))  # type: ignore[union-attr]
            tensor = data(RANK, count, dtype)
            dist.reduce(tensor, 0)
            expected = sum(t.to(torch.int64) for t in everybody(count, dtype)).to(dtype)  # type: ignore[union-attr]
            equal(tensor, expected if RANK == 0 else data(RANK, count, dtype))
            tensor = data(RANK, count, dtype)
            dist.broadcast(tensor, 1)
            equal(tensor, data(1, count, dtype))
            out = torch.empty(SIZE * count, dtype=dtype)
            dist.all_gather_into_tensor(out, data(RANK, count, dtype))
            equal(out, torch.cat(everybody(count, dtype)))
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, data(RANK, SIZE * count, dtype))
            total = sum(t.to(torch.int64) for t in everybody(SIZE * count, dtype)).to(dtype)  # type: ignore[union-attr]
            equal(part, total[RANK * count : (RANK + 1) * count])
    finally:
        moves.piece_bytes, moves.reduced_bytes = whole
    largest, buffers.LARGEST_COUNT = buffers.LARGEST_COUNT, 1 << 10
    try:  # longer than what MPI counts to in one number
        tensor = data(RANK, 3001, torch.uint8)
        request = dist.isend(tensor, (RANK + 1) % SIZE)
        came = torch.empty_like(tensor)
        dist.recv(came, (RANK - 1) % SIZE)
        request.wait()
        equal(came, data((RANK - 1) % SIZE, 3001, torch.uint8))
    finally:
        buffers.LARGEST_COUNT = largest


@probe
def more_than_a_piece() -> None:
    count = 2_500_001
    tensor = data(RANK, count)
    dist.all_reduce(tensor)
    equal(tensor, torch.stack(everybody(count)).sum(0))


@probe
def sparse() -> None:
    def make(rank: int) -> torch.Tensor:
        dense = torch.zeros(6, 2)
        dense[rank : rank + 2] = rank + 1.0
        return dense.to_sparse(1)

    tensor = make(RANK)
    dist.all_reduce(tensor)
    equal(tensor.to_dense(), sum(make(rank).to_dense() for rank in range(SIZE)))  # type: ignore[arg-type]


def main(folder: str) -> None:
    global RANK, SIZE
    from tests.comm import mpi_groups, mpi_moves, mpi_training  # noqa: F401  (they add probes)

    dist.init_process_group("mpi", timeout=timedelta(seconds=20))
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    path = Path(folder, f"{RANK}.json")
    names = sorted(PROBES, key=lambda name: name.startswith("the_timeout"))
    for name in names:
        begun = time.monotonic()
        try:
            results[name] = {"ok": True, "told": PROBES[name]()}
        except Exception:
            results[name] = {"ok": False, "told": traceback.format_exc()}
        results[name]["seconds"] = round(time.monotonic() - begun, 2)
        path.write_text(json.dumps(results))
    # Rank 1 joins in after all, so that the thread of rank 0's failed operation is not stuck at the
    # end.
    if RANK == 0:
        dist.send(torch.ones(1), 1)
    if RANK == 1:
        dist.recv(torch.empty(1), 0)
        for group in list(dist.distributed_c10d._world.pg_names):
            if group.timeout in (1.0, 1.5):
                dist.all_reduce(torch.ones(3 if group.timeout == 1.0 else 20), group=group)
    from mpi4py import MPI

    results["library"] = {"ok": True, "told": MPI.Get_library_version().split("\n")[0]}
    path.write_text(json.dumps(results))


if __name__ == "__main__":
    from tests.comm import mpi_probes  # noqa: PLW0406  (not a second copy of it)

    mpi_probes.main(sys.argv[1])
