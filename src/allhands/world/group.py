"""`init`, `finalize` and `current_world`: the world of this process, and torch's process group
under it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from allhands.errors import AllhandsError, WorldError
from allhands.world import (
    connections,
    cpu_share,
    failure_detector,
    interface,
    mpilib,
    nccl_connections,
)
from allhands.world.allocator import keep_freed_memory
from allhands.world.cores import own_mask
from allhands.world.detection import find_environment
from allhands.world.devices import choose_backend, only_gpu_name, pick_device, visible_gpus
from allhands.world.layout import Environ, Layout
from allhands.world.membership import Member, check_places, meet, own_member, place_of
from allhands.world.native_threads import destroy_group, let_threads_end
from allhands.world.request import (
    DEFAULT_TIMEOUT,
    InitRequest,
    agree,
    device_name,
    seconds_of,
    who_and_where,
)
from allhands.world.stores import OpenStore, open_store

if TYPE_CHECKING:
    import torch


# The variable of a process that takes part later.
JOINS = "ALLHANDS_ELASTIC_JOINS"
# What starts processes and does not notice that one of them hangs, is stopped, or lost its network.
_WATCHED = ("slurm", "openmpi", "mpich")


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from this one. All numbers count from 0.

    `backend` is "gloo", "nccl", "mpi", or "none" for a process alone, which has no group.
    `environment` names what started the processes: "alone", "explicit" (arguments of `init`),
    "torchrun", "allhands launch", "slurm", "openmpi", "mpich" (also Intel MPI), or
    "torch.distributed" when the group was there before `init`.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    environment: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1


@dataclass
class _State:
    world: World
    request: InitRequest
    made_group: bool
    set_ifname: bool = False
    store: Any = None  # rank 0's listener lives as long as this object
    failure_detector: failure_detector.FailureDetector | None = None
    restore_threads: Callable[[], None] | None = None
    # Of a world whose members may change.
    member: Member | None = None
    place: str = ""
    is_aborted: Callable[[], bool] = lambda: False


_state: _State | None = None
_lock = threading.RLock()


def state() -> _State | None:
    """What this process knows of its world, for what changes its members."""
    return _state


def current_world() -> World | None:
    """The world that `init` returned in this process; None before `init` and after `finalize`."""
    return _state.world if _state is not None else None


def init(
    backend: str = "auto",
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    device: str | int | torch.device | None = None,
) -> World:
    """Find the other processes, take a device, and make torch's default process group.

    Who we are comes from the arguments, else torchrun's variables, else Slurm (a step of srun),
    else Open MPI, else MPICH or Intel MPI, else this process is alone. A process that something
    started gets a group even when it is the only one, so that a script which calls
    torch.distributed runs at any size; a process that is alone gets none. Where nobody has set
    torch's number of threads, the processes of a host share its cores. On a processor, glibc is
    told to keep up to 256 MB of freed memory for the next step, unless a variable says how much.

    Args:
        backend: "auto" (nccl where this process sees a GPU, else gloo), "gloo", "nccl" or "mpi".
        init_method: "env://" (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), "tcp://HOST:PORT" (an
            address of rank 0's host) or "file:///PATH" (a new file on a disk that all hosts share).
            None: as the environment tells.
        timeout: seconds or a timedelta, for meeting and for every collective afterwards. None:
            `DEFAULT_TIMEOUT`, 10 minutes.
        rank, world_size: who we are, both or neither.
        local_rank, local_world_size: our place on this host; counted when nobody tells them.
        device: None or "auto", "cpu" (forces gloo), "cuda" (one GPU a local rank), "cuda:N" or N.

    Returns:
        The world. A second call with nothing that contradicts the first returns the same one. A
            group that the caller has already made with torch.distributed is adopted: `finalize`
            will not destroy it.

    Raises:
        UserError: an argument or variable cannot be honoured (more workers than GPUs, nccl without
            one, an unreadable number).
        WorldError: two settings contradict each other, or processes did not come within `timeout`;
            the message names them.
    """
    global _state
    request = InitRequest(
        backend,
        init_method,
        seconds_of(timeout),
        rank,
        world_size,
        local_rank,
        local_world_size,
        device_name(device),
    )
    with _lock:
        if _state is not None:
            _check_same(request, _state)
            return _state.world
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            _state = _adopt(request, os.environ)
        else:
            _state = _start(request, os.environ)
        if _state.world.device.type == "cpu":
            keep_freed_memory(os.environ)
        if _state.world.backend != "none":
            atexit.unregister(_leave_at_exit)
            atexit.register(_leave_at_exit)
        return _state.world


def finalize() -> None:
    """Leave the world: destroy the group that `init` made. Safe to call twice, or without `init`;
    returns within 10 s."""
    global _state
    with _lock:
        state, _state = _state, None
        if state is None:
            return
        if state.failure_detector is not None:
            state.failure_detector.close()
        if state.set_ifname:
            os.environ.pop(interface.VARIABLE, None)
        if state.restore_threads is not None:
            state.restore_threads()
        import torch.distributed as dist

        if state.made_group and dist.is_initialized():
            destroy_group(state.world.backend)


def _leave_at_exit() -> None:
    """Leave the world at the end of a script that did not, unless after an error: the others may
    never come to take the group down together."""
    if getattr(sys, "last_type", None) is None:
        finalize()
    let_threads_end()


def _start(request: InitRequest, environ: Environ) -> _State:
    layout, meeting = who_and_where(request, environ)
    watched = layout.environment in _WATCHED and meeting is not None and not meeting.path
    silence = failure_detector.heartbeat_timeout(environ) if watched else None
    backend, device = choose_backend(request.backend, request.device)
    gpus = visible_gpus() if device.startswith("cuda") else 0
    if meeting is None:
        chosen = pick_device(device, 0, gpus)
        world = World(0, 0, 0, 1, 1, chosen, "none", layout.environment)
        return _State(world, request, made_group=False)

    if backend == "mpi":
        mpilib.check_launched(layout, environ)
    timeout = request.timeout if request.timeout is not None else DEFAULT_TIMEOUT.total_seconds()
    deadline = time.monotonic() + timeout
    opened = open_store(meeting, layout, timeout)
    member = own_member(
        rank=layout.rank,
        world_size=layout.world_size,
        backend=backend,
        device=device,
        local_rank=layout.local_rank,
        local_world_size=layout.local_world_size,
        node_rank=layout.node_rank,
        gpus=gpus,
        gpu=only_gpu_name(gpus),
        address=opened.own_address,
        cores=own_mask(),
    )
    if environ.get(JOINS) == "1":
        opened.everyone_came()
        return _outside(request, layout, opened, member)
    try:
        members = meet_all(opened.store, member, opened.place, deadline)
    finally:
        opened.everyone_came()
    local_rank, local_size, node_rank = place_of(members, layout.rank)
    chosen = pick_device(device, local_rank, gpus)
    set_ifname = interface.set_for_gloo(members, layout.rank)
    one_host = len({other.host for other in members}) == 1
    detector = None
    if silence is not None and layout.world_size > 1:
        detector = _detect_failures(opened.store, layout, opened.place, silence, one_host)
    make_group(opened.store, backend, chosen, layout, timeout)
    restore_threads = cpu_share.limit_threads(members, layout.rank, environ)
    if layout.environment in {"openmpi", "mpich"}:
        mpilib.end_job_on_error(layout.rank, member.name, environ)
    world = World(
        layout.rank,
        local_rank,
        node_rank,
        layout.world_size,
        local_size,
        chosen,
        backend,
        layout.environment,
    )
    return _State(
        world,
        request,
        made_group=True,
        set_ifname=set_ifname,
        store=opened.store,
        failure_detector=detector,
        restore_threads=restore_threads,
        member=member,
        place=opened.place,
    )


def _outside(request: InitRequest, layout: Layout, opened: OpenStore, member: Member) -> _State:
    """The world of a process that takes part later: `regroup` makes its group, and gives it its
    rank."""
    local_rank = layout.local_rank or 0
    world = World(
        layout.rank,
        local_rank,
        layout.node_rank or 0,
        layout.world_size,
        layout.local_world_size or 1,
        pick_device(member.device, local_rank, member.gpus),
        member.backend,
        layout.environment,
    )
    return _State(
        world, request, made_group=False, store=opened.store, member=member, place=opened.place
    )


def _detect_failures(
    store: Any, layout: Layout, place: str, silence: float, one_host: bool
) -> failure_detector.FailureDetector:
    """The ranks watch one another."""
    from torch.distributed import PrefixStore

    host = place.rpartition(":")[0]
    shared = PrefixStore("allhands", store)
    return failure_detector.start(
        shared, layout.rank, layout.world_size, host, silence, local=one_host
    )


def meet_all(
    store: Any,
    member: Member,
    place: str,
    deadline: float,
    superseded: Callable[[], bool] = lambda: False,
) -> list[Member]:
    from torch.distributed import PrefixStore

    return meet(PrefixStore("allhands", store), member, place, deadline, superseded)


def make_group(
    store: Any,
    backend: str,
    device: torch.device,
    layout: Layout,
    timeout: float,
    superseded: Callable[[], bool] = lambda: False,
) -> None:
    """Make the default process group, within `timeout` seconds; in an elastic job nccl heeds
    `superseded`, which tells that it is not to be made any more.
    """
    import torch.distributed as dist

    may_end = backend == "nccl" and connections.is_elastic()
    extra: dict[str, Any] = {}
    if backend != "mpi":  # which knows the ranks itself
        extra = {"store": store, "rank": layout.rank, "world_size": layout.world_size}
    if backend == "nccl" and not may_end:
        extra["device_id"] = device
    try:
        with connections.noted() if backend == "gloo" else nullcontext():
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **extra)
        if backend == "gloo":  # none leaves while another one still connects
            dist.barrier()
        if may_end:
            nccl_connections.connect(dist.group.WORLD, device, timeout, superseded)
    except RuntimeError as error:
        if isinstance(error, AllhandsError):
            raise
        raise WorldError(
            f"rank {layout.rank} met the other {layout.world_size - 1} processes, but {backend} "
            f"could not connect them: {error} "
            f"({interface.VARIABLE}={os.environ.get(interface.VARIABLE, '(unset)')})"
        ) from error
    if backend == "mpi":
        mpilib.check_same(dist.get_rank(), dist.get_world_size(), layout)


def _adopt(request: InitRequest, environ: Environ) -> _State:
    """The world of a group that the caller made. Collective when the environment does not tell the
    local ranks.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    backend = str(dist.get_backend()).split(",", maxsplit=1)[0]
    if request.backend not in {"auto", backend}:
        raise WorldError(
            f"init(backend={request.backend!r}), but torch.distributed already runs with "
            f"{backend!r}."
        )
    for name, passed, told in (
        ("rank", request.rank, rank),
        ("world_size", request.world_size, size),
    ):
        agree(name, passed, told)
    environment = find_environment(environ)
    layout = environment.layout(environ) if environment is not None else None
    if layout is None or (layout.rank, layout.world_size) != (rank, size):
        layout = Layout(rank, size)
    device = choose_backend("gloo" if backend not in {"gloo", "nccl"} else backend, request.device)[
        1
    ]
    gpus = visible_gpus() if device.startswith("cuda") else 0
    own = own_member(
        rank=rank,
        world_size=size,
        backend=backend,
        device=device,
        local_rank=agree("local_rank", request.local_rank, layout.local_rank),
        local_world_size=agree(
            "local_world_size", request.local_world_size, layout.local_world_size
        ),
        node_rank=layout.node_rank,
        gpus=gpus,
        gpu=only_gpu_name(gpus),
    )
    if None in (own.local_rank, own.local_world_size, own.node_rank):
        members: list[Any] = [None] * size
        dist.all_gather_object(members, own)
        check_places(members)
        local_rank, local_size, node_rank = place_of(members, rank)
    else:
        assert own.local_rank is not None
        assert own.local_world_size is not None
        assert own.node_rank is not None
        local_rank, local_size, node_rank = own.local_rank, own.local_world_size, own.node_rank
    chosen = pick_device(device, local_rank, gpus)
    world = World(
        rank, local_rank, node_rank, size, local_size, chosen, backend, "torch.distributed"
    )
    return _State(world, request, made_group=False)


def _check_same(request: InitRequest, state: _State) -> None:
    """A later `init` may repeat what the first said, or say less; anything else would be silently
    ignored."""
    world, first = state.world, state.request
    told: dict[str, tuple[Any, Any]] = {
        "rank": (request.rank, world.rank),
        "world_size": (request.world_size, world.world_size),
        "local_rank": (request.local_rank, world.local_rank),
        "local_world_size": (request.local_world_size, world.local_world_size),
        "init_method": (request.init_method, first.init_method),
        "timeout": (
            request.timeout,
            first.timeout if first.timeout is not None else DEFAULT_TIMEOUT.total_seconds(),
        ),
    }
    if request.backend not in {"auto", first.backend}:
        told["backend"] = (request.backend, world.backend)
    if request.device not in {"auto", first.device, world.device.type}:
        told["device"] = (request.device, str(world.device))
    for name, (now, before) in told.items():
        if now is not None and now != before:
            raise WorldError(
                f"init({name}={now!r}), but this process already has a world with "
                f"{name}={before!r}: call allhands.finalize() first, or leave the argument out."
            )
