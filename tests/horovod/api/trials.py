"""One use of each of Horovod's calls for torch, on every rank of a world of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import allhands.horovod.torch as hvd


class _State:
    """A model, its optimizer and its state, as scripts make them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        made = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(made, self.model.named_parameters())
        self.sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, sampler=self.sampler)
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """What uses each call and gives the same on every rank; a timeline is written to `folder`."""
    rank, size = hvd.rank(), hvd.size()
    mine, rows = torch.full((size,), float(rank)), torch.full((rank + 1, 2), float(rank))
    made = _State()
    some = hvd.ProcessSet([0])
    wait = hvd.synchronize
    return {
        "init": hvd.init,
        "is_initialized": hvd.is_initialized,
        "start_timeline": lambda: hvd.start_timeline(str(folder / f"{rank}.json")),
        "stop_timeline": hvd.stop_timeline,
        "size": lambda: hvd.size() == size,
        "local_size": lambda: hvd.local_size() == size,
        "cross_size": lambda: hvd.cross_size() == 1,
        "rank": lambda: hvd.rank() == rank,
        "local_rank": lambda: hvd.local_rank() == rank,
        "cross_rank": lambda: hvd.cross_rank() == 0,
        "mpi_threads_supported": hvd.mpi_threads_supported,
        "mpi_enabled": hvd.mpi_enabled,
        "mpi_built": hvd.mpi_built,
        "gloo_enabled": hvd.gloo_enabled,
        "gloo_built": hvd.gloo_built,
        "nccl_built": lambda: isinstance(hvd.nccl_built(), bool),
        "ddl_built": hvd.ddl_built,
        "ccl_built": hvd.ccl_built,
        "cuda_built": lambda: isinstance(hvd.cuda_built(), bool),
        "rocm_built": lambda: isinstance(hvd.rocm_built(), bool),
        "global_process_set": lambda: hvd.global_process_set.size() == size,
        "ProcessSet": lambda: str(some),
        "add_process_set": lambda: hvd.add_process_set(some).process_set_id == 1,
        "ProcessSet.size": some.size,
        "ProcessSet.included": lambda: some.included() == (rank == 0),
        "ProcessSet.rank": lambda: rank > 0 or some.rank() == 0,
        "remove_process_set": lambda: hvd.remove_process_set(some),
        "Average": lambda: hvd.allreduce(mine, op=hvd.Average),
        "Sum": lambda: hvd.allreduce(mine, op=hvd.Sum),
        "Min": lambda: hvd.allreduce(mine, op=hvd.Min),
        "Max": lambda: hvd.allreduce(mine, op=hvd.Max),
        "Product": lambda: hvd.allreduce(mine, op=hvd.Product),
        "Adasum": lambda: hvd.allreduce(mine, op=hvd.Adasum),
        "Compression": lambda: hvd.allreduce(mine, compression=hvd.Compression.fp16),
        "allreduce": lambda: hvd.allreduce(mine),
        "allreduce_": lambda: hvd.allreduce_(mine.clone()),
        "allreduce_async": lambda: wait(hvd.allreduce_async(mine)),
        "allreduce_async_": lambda: wait(hvd.allreduce_async_(mine.clone())),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([mine, mine + 1]),
        "grouped_allreduce_": lambda: hvd.grouped_allreduce_([mine.clone(), mine + 1]),
        "grouped_allreduce_async": lambda: wait(hvd.grouped_allreduce_async([mine, mine + 1])),
        "grouped_allreduce_async_": lambda: wait(hvd.grouped_allreduce_async_([mine.clone()])),
        "sparse_allreduce_async": lambda: wait(
            hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="sparse", op=hvd.Sum)
        ).to_dense(),
        "allgather": lambda: hvd.allgather(rows),
        "allgather_async": lambda: wait(hvd.allgather_async(rows)),
        "grouped_allgather": lambda: hvd.grouped_allgather([rows, rows + 1]),
        "grouped_allgather_async": lambda: wait(hvd.grouped_allgather_async([rows])),
        "broadcast": lambda: hvd.broadcast(mine, 0),
        "broadcast_": lambda: hvd.broadcast_(mine.clone(), 0),
        "broadcast_async": lambda: wait(hvd.broadcast_async(mine, 0)),
        "broadcast_async_": lambda: wait(hvd.broadcast_async_(mine.clone(), 0)),
        "alltoall": lambda: hvd.alltoall(torch.arange(float(size))) == rank,
        "alltoall_async": lambda: wait(hvd.alltoall_async(torch.arange(float(size)), [1] * size))[
            1
        ],
        "reducescatter": lambda: hvd.reducescatter(mine),
        "reducescatter_async": lambda: wait(hvd.reducescatter_async(mine)),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter([mine, mine + 1]),
        "grouped_reducescatter_async": lambda: wait(hvd.grouped_reducescatter_async([mine])),
        "join": lambda: hvd.join() in range(size),
        "barrier": hvd.barrier,
        "poll": lambda: hvd.poll(hvd.allreduce_async(mine, name="polled")) in (True, False),
        "synchronize": lambda: hvd.synchronize(hvd.allreduce_async(mine)),
        "broadcast_parameters": lambda: (
            hvd.broadcast_parameters(made.model.state_dict(), 0) or list(made.model.parameters())
        ),
        "broadcast_optimizer_state": lambda: (
            hvd.broadcast_optimizer_state(made.optimizer, 0) or made.optimizer.state_dict()["state"]
        ),
        "broadcast_object": lambda: hvd.broadcast_object({"rank": rank}, 0),
        "allgather_object": lambda: hvd.allgather_object({"rank": rank}),
        "DistributedOptimizer": lambda: isinstance(made.optimizer, torch.optim.SGD),
        "SyncBatchNorm": lambda: hvd.SyncBatchNorm(2)(rows).isfinite().all(),
        "HorovodInternalError": lambda: issubclass(hvd.HorovodInternalError, RuntimeError),
        **_elastic(made),
        "shutdown": lambda: hvd.shutdown() or hvd.is_initialized(),
    }


def _elastic(made: _State) -> dict[str, Callable[[], Any]]:
    state, sampler, elastic = made.state, made.sampler, hvd.elastic
    return {
        "run": lambda: elastic.run(lambda given: given is state)(state),
        "TorchState": lambda: state.model is made.model,
        "TorchState.register_reset_callbacks": lambda: state.register_reset_callbacks([]),
        "TorchState.on_reset": state.on_reset,
        "TorchState.commit": state.commit,
        "TorchState.check_host_updates": state.check_host_updates,
        "TorchState.save": state.save,
        "TorchState.restore": state.restore,
        "TorchState.sync": state.sync,
        "ElasticSampler": lambda: len(sampler) == 8 // hvd.size(),
        "ElasticSampler.record_batch": lambda: sampler.record_batch(0, 1),
        "ElasticSampler.state_dict": lambda: len(sampler.state_dict()) > 0,
        "ElasticSampler.load_state_dict": lambda: sampler.load_state_dict(sampler.state_dict()),
        "ElasticSampler.reset": sampler.reset,
        "ElasticSampler.set_epoch": lambda: sampler.set_epoch(1),
    }
