"""Probes of the mpi backend: messages between two ranks, groups, futures, refusals, waits and
time-outs; part of mpi_probes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm import mpi_probes
from tests.comm.mpi_probes import data, equal, everybody, probe, refused


@probe
def sends_and_receives() -> None:
    rank, size = mpi_probes.RANK, mpi_probes.SIZE
    after, before = (rank + 1) % size, (rank - 1) % size
    came = torch.empty(5)
    for tag in (0, 7):
        request = dist.isend(data(rank), after, tag=tag)
        assert dist.recv(came, before, tag=tag) == before
        request.wait()
        equal(came, data(before))
    if rank == 0:
        found = []
        for _ in range(size - 1):
            source = dist.recv(came, tag=5)  # not what comes next from a rank that is ahead
            equal(came, data(source))
            found.append(source)
        assert sorted(found) == list(range(1, size)), found
    else:
        dist.send(data(rank), 0, tag=5)
    out, gaps = data(rank, 10)[::2], torch.zeros(10)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, gaps[::2], before), dist.P2POp(dist.isend, out, after)]
    )
    for request in requests:
        request.wait()
    equal(gaps[::2], data(before, 10)[::2])
    assert gaps[1::2].abs().sum() == 0
    for value in (torch.tensor(3.5 + rank), torch.empty(0)):
        request = dist.isend(value, after)
        came = torch.empty_like(value)
        dist.recv(came, before)
        request.wait()
        equal(came, torch.tensor(3.5 + before) if value.dim() == 0 else value)
    request = dist.isend(data(rank, 4), after)
    refused(lambda: dist.recv(torch.empty(6), before), "recv from", "16 bytes", "24")
    request.wait()


# Groups.


@probe
def groups_in_opposite_orders() -> None:
    rank = mpi_probes.RANK
    ranks = [0, 1]
    one, two = dist.new_group(ranks), dist.new_group(ranks)
    assert dist.get_world_size(one) == 2 if rank in ranks else True
    if rank not in ranks:
        return
    first, second = data(rank), data(rank) * 2
    order = [(first, one), (second, two)]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in (order if rank == 0 else order[::-1])
    ]
    for work in works:
        work.wait()
    equal(first, data(0) + data(1))
    equal(second, 2 * (data(0) + data(1)))
    dist.destroy_process_group(one)
    refused(lambda: one.allreduce([first]), "was destroyed")


@probe
def a_group_without_rank_0() -> None:
    rank, size = mpi_probes.RANK, mpi_probes.SIZE
    group = dist.new_group(list(range(1, size)))
    if rank == 0:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        return
    tensor = data(rank)
    dist.broadcast(tensor, 1, group=group)
    equal(tensor, data(1))
    dist.all_reduce(tensor, group=group)
    equal(tensor, data(1) * (size - 1))


@probe
def mixed_with_gloo() -> None:
    refused(lambda: dist.new_group(backend="cpu:mpi,cuda:gloo"), "cannot be mixed", "backend='mpi'")


# Futures.


@probe
def futures() -> None:
    rank, size = mpi_probes.RANK, mpi_probes.SIZE
    tensor = data(rank)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    equal(doubled.wait(), 2 * torch.stack(everybody()).sum(0))
    assert work.is_completed()
    assert work.is_success()
    equal(work.result()[0], tensor)
    # What PowerSGD does: a callback that itself waits for a collective, several of them at once.
    tensors = [data(rank) + i for i in range(5)]

    def second(future: Any) -> torch.Tensor:
        value = future.value()[0]
        inner = torch.ones(2)
        return value + dist.all_reduce(inner, group=other, async_op=True).get_future().wait()[0][0]

    other = dist.new_group(list(range(size)))
    chained = [dist.all_reduce(t, async_op=True).get_future().then(second) for t in tensors]
    for i, future in enumerate(chained):
        equal(future.wait(), torch.stack(everybody()).sum(0) + size * i + size)


@probe
def many_threads_and_barrier() -> None:
    rank, size = mpi_probes.RANK, mpi_probes.SIZE
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    tensors = [data(rank) + i for i in range(3)]

    def work(i: int) -> None:
        for _ in range(20):
            dist.all_reduce(tensors[i], ReduceOp.MAX, group=groups[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tensor in enumerate(tensors):
        equal(tensor, torch.stack(everybody()).amax(0) + i)
    dist.barrier()


# Refusals that can be seen here, before anything is sent.


@probe
def refusals() -> None:
    rank, size = mpi_probes.RANK, mpi_probes.SIZE
    group = dist.group.WORLD
    refused(
        lambda: dist.all_reduce(data(rank), dist._make_nccl_premul_sum(2.0)), "PREMUL_SUM", "factor"
    )
    refused(
        lambda: dist.all_gather([torch.empty(5)] * (size - 1), data(rank)), str(size), str(size - 1)
    )
    refused(lambda: dist.all_gather([torch.empty(4)] * size, data(rank)), "5 elements", "[4]")
    refused(
        lambda: group.allgather([[torch.empty(5, dtype=torch.int32)] * size], [data(rank)]),
        "float32",
        "int32",
    )
    refused(
        lambda: dist.all_gather_into_tensor(torch.empty(5 * size + 1), data(rank)), str(5 * size)
    )
    refused(
        lambda: dist.reduce_scatter_tensor(torch.empty(5), data(rank, 5 * size + 1)), str(5 * size)
    )
    refused(lambda: dist.all_to_all_single(torch.empty(size + 1), data(rank, size + 1)), "evenly")
    refused(
        lambda: dist.all_to_all_single(torch.empty(5), data(rank), [5] * size, [1] * size),
        "output_split_sizes",
    )
    refused(lambda: dist.send(data(rank), (rank + 1) % size, tag=-3), "tag=-3")
    refused(lambda: group.broadcast([torch.empty(3, device="meta")]), "meta")
    options = dist.BroadcastOptions()
    options.rootRank = size
    refused(lambda: group.broadcast([data(rank)], options), f"group rank {size}")


@probe
def a_wait_of_its_own_may_be_repeated() -> None:
    rank = mpi_probes.RANK
    dist.barrier()
    if rank == 0:
        came = torch.empty(5)
        work = dist.irecv(came, 1)
        refused(lambda: work.wait(timedelta(milliseconds=100)), "0.1 s", "recv from group rank 1")
        dist.send(data(0), 1)
        work.wait()
        equal(came, data(1))
    elif rank == 1:
        dist.recv(torch.empty(5), 0)
        dist.send(data(1), 0)


@probe
def the_timeout_names_collective_group_and_seconds() -> None:
    """Last of all: a group is of no use after it."""
    rank = mpi_probes.RANK
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank != 0:
        return
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    refused(
        work.wait,
        "all_reduce number 0",
        "float32 of shape [3]",
        "on rank 0",
        "of ranks 0, 1",
        "timeout of 1 s",
    )
    future = work.get_future()
    try:
        future.wait()
    except Exception as error:
        assert "timeout of 1 s" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("the future of a failed operation has a value")
    refused(lambda: dist.all_reduce(torch.ones(3), group=group), "cannot run", "earlier operation")


@probe
def the_timeout_reaches_ddp() -> None:
    rank = mpi_probes.RANK
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    if rank > 1:
        return
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if rank == 1:
        return  # makes no step
    try:
        wrapped(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        assert "timeout of 1.5 s" in str(error), error  # noqa: PT017
        assert "float32 of shape [20]" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("gradients of a rank that did not come")
