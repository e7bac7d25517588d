"""What a Horovod script asks before it communicates: who am I, how many are we, what is built
in."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

from allhands import world as worlds
from allhands.compat import default_store
from allhands.errors import UserError, WorldError
from allhands.horovod import engine, settings
from allhands.horovod.exceptions import NotInitializedError
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.launch import horovod_alias

_places: list[tuple[int, int]] = []  # of each rank: its node and its number there
_made_world = False
_times = 0


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Find the other ranks and connect them, as `allhands.init` does. A second call does nothing.

    Args:
        comm: None; a list of all ranks, or an mpi4py communicator of all of them, mean the same.
        process_sets: those to put in use, on all ranks in the same order; "dynamic", which Horovod
            needs for `add_process_set`, is always possible here.

    Raises:
        UserError: `comm` is a part of the ranks; a process set cannot be used.
        WorldError: the ranks do not find one another.
    """
    global _made_world, _times, _places
    if is_initialized():
        return
    chosen = settings.read(os.environ)
    _made_world = _made_world or worlds.current_world() is None
    world = worlds.current_world() or worlds.init(timeout=chosen.start_timeout)
    try:
        _check_comm(comm, world.world_size)
        if isinstance(process_sets, str) and process_sets != "dynamic":
            raise UserError(
                f"process_sets={process_sets!r}: set process_sets to a list of hvd.ProcessSet, or "
                "to 'dynamic'"
            )
        store = None
        if not world.is_alone:
            from torch.distributed import PrefixStore

            shared = default_store()
            if shared is None:
                raise WorldError(
                    f"the group of backend {world.backend!r} has no store; call hvd.init() before "
                    "any other group is made"
                )
            store = PrefixStore(f"allhands/horovod/{_times}", shared)
            store.set(f"place/{world.rank}", f"{world.node_rank} {world.local_rank}")
            texts = [
                store.get(f"place/{rank}").decode().split() for rank in range(world.world_size)
            ]
            _places = [(int(node), int(local)) for node, local in texts]
        else:
            _places = [(world.node_rank, world.local_rank)]
        _times += 1
        engine.set_current(engine.Engine(world, chosen, store))
        # mpirun and srun set none of them.
        own = {"RANK": rank(), "WORLD_SIZE": size(), "LOCAL_RANK": local_rank()}
        own["LOCAL_WORLD_SIZE"] = local_size()
        horovod_alias.set_variables(horovod_alias.variables(own, cross_rank(), cross_size()))
        atexit.unregister(shutdown)
        atexit.register(shutdown)  # after the world's own, so that it runs before that
        for process_set in (
            process_sets if process_sets is not None and not isinstance(process_sets, str) else ()
        ):
            engine.current().add_set(process_set)
    except BaseException:
        shutdown()
        raise


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    ranks = list(comm) if isinstance(comm, list | tuple | range) else None
    if ranks is None and not hasattr(comm, "Get_size"):
        raise UserError(
            f"init(comm={comm!r}): set comm to None, a list of all ranks, or an mpi4py "
            "communicator of all of them"
        )
    if (sorted(ranks) != list(range(size))) if ranks is not None else comm.Get_size() != size:
        raise UserError(
            f"init(comm={comm!r}) is a part of the {size} ranks; leave comm out, and give "
            "process_sets=[hvd.ProcessSet([...])]"
        )


def shutdown() -> None:
    """Leave: other ranks that still ask this one for something get an error. `init` may follow, on
    all ranks.

    The world itself, with torch's process group, stays until the end of the program, or
    `allhands.finalize`.
    """
    global _made_world
    if is_initialized():
        running = engine.current()
        engine.set_current(None)
        running.close()
    world = worlds.current_world()
    if _made_world and world is not None and world.is_alone:
        worlds.finalize()
        _made_world = False


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    try:
        engine.current()
    except NotInitializedError:
        return False
    return True


def rank() -> int:
    """This process among all, counted from 0."""
    return engine.current().world.rank


def size() -> int:
    """How many processes there are."""
    return engine.current().world.world_size


def local_rank() -> int:
    """This process among those of its host."""
    return engine.current().world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return engine.current().world.local_world_size


def cross_rank() -> int:
    """This host among those that have a process with this one's local rank."""
    return _across().index(engine.current().world.node_rank)


def cross_size() -> int:
    """How many hosts have a process with this one's local rank."""
    return len(_across())


def _across() -> list[int]:
    local = engine.current().world.local_rank
    return sorted(node for node, own in _places if own == local)


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    engine.current()
    nodes = [node for node, _ in _places]
    return len({nodes.count(node) for node in nodes}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what happens from now on to a file, on rank 0 (see `timeline`). There are no cycles to
    mark.

    Raises:
        UserError: it cannot be written, or `mark_cycles` is set.
    """
    if mark_cycles:
        raise UserError(
            "start_timeline(mark_cycles=True): operations begin when all ranks are ready, not in "
            "cycles; leave it out"
        )
    engine.current().timeline.start(file_path)


def stop_timeline() -> None:
    """End the file that `start_timeline` began."""
    engine.current().timeline.stop()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Put a process set, or a list of ranks as one, in use; called on all ranks with the same
    ranks.

    Raises:
        UserError: it has a rank that does not exist, or is in use already.
        HorovodInternalError: another rank gave other ranks.
    """
    running = engine.current()
    return running.add_set(
        process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Put a process set away; called on all ranks. False: it is not in use, or is the global
    one."""
    return engine.current().remove_set(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each process set that is in use."""
    running = engine.current()
    return {number: list(found.ranks or []) for number, found in sorted(running._sets.items())}


def mpi_threads_supported() -> bool:
    """Whether operations may be called from several threads: always."""
    engine.current()
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Whether operations go over MPI: never; ranks that mpirun started are found, and connected by
    gloo or nccl."""
    return False


def mpi_enabled() -> bool:
    """See `mpi_built`."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Whether CPU tensors go over gloo."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_gloo_available())


def gloo_enabled() -> bool:
    """See `gloo_built`."""
    return gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether GPU tensors can go over nccl."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_nccl_available())


def cuda_built(verbose: bool = False) -> bool:
    """Whether torch was built for CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether torch was built for ROCm."""
    import torch

    return torch.version.hip is not None


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM's DDL is there: never."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel's oneCCL is there: never."""
    return False


__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
