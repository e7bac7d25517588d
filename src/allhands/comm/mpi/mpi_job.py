"""This process's part in the MPI job: MPI is started, groups are made, and the process leaves
without hanging the others."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm.mpi.moves import Moves
from allhands.comm.mpi.process_group import MPIGroup
from allhands.comm.mpi.work import Channel, Work, poller, watchdog
from allhands.errors import UserError, WorldError
from allhands.world import mpilib
from allhands.world.detection import detected_environment
from allhands.world.layout import Environ, Layout, Meeting
from allhands.world.stores import open_store

_TIMEOUT = timedelta(minutes=30)  # torch's own, for a group that is made without one
CUDA_VARIABLE = "ALLHANDS_MPI_CUDA"
_TOGETHER_S = 1.0  # ranks that leave within this time need no notice
_ARRIVES_S = 5.0  # a message that was sent before its sender left has arrived by then

_lock = threading.RLock()
_timeout = _TIMEOUT
_made: Counter[tuple[int, ...]] = Counter()
_channels: list[Channel] = []
_groups: list[MPIGroup] = []
_leaving: Any = None  # a communicator of all ranks, for the end
# Rank -> when its notice came, and how many collectives it made in each group.
_left: dict[int, tuple[float, dict[str, int]]] = {}


def new_group(
    made: Callable[..., Any],
    size: int,
    rank: int,
    ranks: Sequence[int],
    backend: str,
    store: Any,
    *rest: Any,
    **options: Any,
) -> Any:
    """What torch's function `made` returns for a group with this backend, given what it takes; no
    `ranks` mean all.

    Raises:
        UserError: mpi4py is missing, or the backend is mixed with another one.
        WorldError: no MPI launcher started the world, or MPI's ranks are not the world's.
    """
    global _timeout
    if str(backend).lower() != "mpi":
        raise UserError(
            f"backend={str(backend)!r}: mpi cannot be mixed with another backend, because its "
            "group takes tensors of the CPU and of CUDA alike; write backend='mpi', and make "
            "another group with dist.new_group(backend='gloo') or 'nccl'"
        )
    if options.get("backend_options") is not None:
        raise UserError("pg_options: the mpi backend has no options; leave the argument out")
    layout = _layout(os.environ)
    mpilib.check_launched(layout, os.environ)
    MPI = mpilib.load_mpi()
    mpilib.check_threads(MPI)
    world = MPI.COMM_WORLD
    if ranks:
        layout = Layout(dist.get_rank(), dist.get_world_size(), environment="torch.distributed")
    mpilib.check_same(world.Get_rank(), world.Get_size(), layout, mpilib.version(MPI))
    with _lock:
        _timeout = options.get("timeout") or _TIMEOUT
        if not ranks:
            seconds = _timeout.total_seconds()
            store = open_store(
                Meeting(mpi_broadcast=True), Layout(world.Get_rank(), world.Get_size()), seconds
            ).store
        return made(size, rank, ranks, backend, store, *rest, **options)


def create(ranks: Sequence[int]) -> MPIGroup:
    """A group of the MPI ranks `ranks` (none: all), called by each of them; `new_group` has started
    MPI."""
    global _leaving
    MPI = mpilib.load_mpi()
    world = MPI.COMM_WORLD
    if ranks:
        comm = world.Create_group(world.Get_group().Incl(list(ranks)))
    else:
        ranks, comm = range(world.Get_size()), world.Dup()
        if _leaving is None:
            _leaving = world.Dup()
            watchdog.also = _fail_what_cannot_complete
            atexit.register(_leave)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    members = tuple(ranks)
    _made[members] += 1
    key = f"{'-'.join(map(str, members))}/{_made[members]}"
    tag = comm.Get_attr(MPI.TAG_UB)
    channels = [
        Channel(Moves(MPI, one, tag), members, name)
        for one, name in ((comm, key), (comm.Dup(), f"{key}/then"))
    ]
    cuda_aware = torch.cuda.is_available() and takes_gpu_memory(os.environ)
    group = MPIGroup(channels, _timeout.total_seconds(), cuda_aware)
    _channels.extend(channels)
    _groups.append(group)
    return group


def _layout(environ: Environ) -> Layout | None:
    environment = detected_environment(environ)
    return environment.layout(environ) if environment is not None else None


def takes_gpu_memory(environ: Environ) -> bool:
    """Whether the loaded MPI library takes pointers to GPU memory: what ALLHANDS_MPI_CUDA says (1
    or 0), else the library."""
    told = environ.get(CUDA_VARIABLE, "").strip()
    if told:
        if told not in {"0", "1"}:
            raise UserError(
                f"{CUDA_VARIABLE}={told!r} must be 1 (the MPI library takes GPU memory) or 0 "
                "(stage it through the CPU)"
            )
        return told == "1"
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    paths = {line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line}
    for path in paths:
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _leave() -> None:
    """At the end of the process: MPI_Finalize would wait, without a word, for ranks that wait for
    this one.

    What was called is completed first. Ranks that do not leave at about the same time are told how
    far this one came.
    """
    from mpi4py import MPI

    if MPI.Is_finalized() or _leaving is None:
        return
    for work in watchdog.pending_of():
        work.settle()
    for group in _groups:
        group.shutdown()
    poller.stop()
    watchdog.stop()
    stuck = next((group.stuck for group in _groups if group.stuck), None)
    rank, size = _leaving.Get_rank(), _leaving.Get_size()
    if stuck is not None:
        print(
            f"allhands: rank {rank} on {MPI.Get_processor_name()} ends the job: {stuck}",
            file=sys.stderr,
            flush=True,
        )
        _leaving.Abort(1)
    together = _leaving.Ibarrier()
    deadline, told = time.monotonic() + _TOGETHER_S, False
    notices = []
    while not together.Test():
        if not told and time.monotonic() > deadline:
            told = True
            notice = json.dumps({channel.name: channel.started for channel in _channels}).encode()
            notices = [
                _leaving.Isend([notice, MPI.BYTE], other) for other in range(size) if other != rank
            ]
        time.sleep(0.001 if not told else 0.02)
    del notices


def _fail_what_cannot_complete(pending: list[tuple[Work, Channel]]) -> None:
    """Fail each operation that needs a rank which has left without making the same call."""
    from mpi4py import MPI

    if not pending or MPI.Is_finalized():
        return
    status = MPI.Status()
    while _leaving.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        notice = bytearray(status.Get_count(MPI.BYTE))
        _leaving.Recv([notice, MPI.BYTE], status.Get_source(), status.Get_tag())
        _left[status.Get_source()] = (time.monotonic(), json.loads(notice))
    for rank, (when, numbers) in _left.items():
        waited = time.monotonic() - when > _ARRIVES_S
        for work, channel in pending:
            if rank not in channel.members:
                continue
            if work.peer is None:
                hopeless = work.number >= numbers.get(channel.name, 0)
            elif work.peer < 0:
                hopeless = waited and all(
                    member in _left for member in channel.members if member != _leaving.Get_rank()
                )
            else:
                hopeless = waited and channel.members[work.peer] == rank
            if hopeless:
                reason = (
                    f"rank {rank} has left (its script ended, or it called sys.exit) without "
                    "making the same call"
                )
                watchdog.fail(work, WorldError(f"{work.what()} can never be complete: {reason}"))
