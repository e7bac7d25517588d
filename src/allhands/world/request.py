"""The arguments of `init`, and what follows from them and the environment: the layout of the world
and where its processes meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from allhands.errors import UserError, WorldError
from allhands.world.detection import detected_environment, explicit_layout, find_environment
from allhands.world.environments import Environment
from allhands.world.layout import Environ, Layout, Meeting, given_meeting
from allhands.world.stores import parse_method

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long `init` waits for the other processes, and a collective for its peers. torch waits 30
minutes under gloo, which is longer than anybody watches a hung job; 10 is its own choice for nccl.
"""


@dataclass(frozen=True)
class InitRequest:
    """The arguments of `init`, to tell a repeated call from a different one."""

    backend: str
    init_method: str | None
    timeout: float | None
    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    device: str


def who_and_where(request: InitRequest, environ: Environ) -> tuple[Layout, Meeting | None]:
    """Our layout and where to meet; no meeting for a process that nothing started or asked to
    meet."""
    method = request.init_method
    meeting: Meeting | None = None
    rank, size = request.rank, request.world_size
    if method is not None and method != "env://":
        meeting, url_rank, url_size = parse_method(method)
        rank, size = agree("rank", rank, url_rank), agree("world_size", size, url_size)
    if (rank is None) != (size is None):
        have, lack = ("rank", "world_size") if size is None else ("world_size", "rank")
        raise UserError(
            f"init({have}={rank if size is None else size}) without {lack}=: pass both, or neither."
        )

    if rank is not None and size is not None:
        layout = explicit_layout(environ, rank, size, request.local_rank, request.local_world_size)
        environment = detected_environment(environ)
        if environment is not None:
            told = environment.layout(environ)
            # init(rank=int(os.environ["RANK"]), …) repeats the environment, which also knows where
            # to meet.
            if (told.rank, told.world_size) == (rank, size):
                return _detected(request, environ, environment, told, meeting)
        if meeting is None:
            meeting = given_meeting(environ)
        if meeting is None and (size > 1 or method is not None):
            raise UserError(
                f"init(rank={rank}, world_size={size}) does not say where to meet: pass "
                "init_method='tcp://HOST:PORT' with an "
                "address of rank 0's host, or set MASTER_ADDR and MASTER_PORT."
            )
        return layout, meeting

    environment = find_environment(environ)
    if environment is None or (method == "env://" and environment.name != "torchrun"):
        if method is None:
            return _alone(request), None
        if method == "env://":
            needed = "RANK and WORLD_SIZE in the environment"
        else:
            needed = "rank= and world_size="
        raise UserError(
            f"init_method={method!r} needs {needed}, but nothing says who this process is."
        )
    return _detected(request, environ, environment, environment.layout(environ), meeting)


def _detected(
    request: InitRequest,
    environ: Environ,
    environment: Environment,
    told: Layout,
    meeting: Meeting | None,
) -> tuple[Layout, Meeting]:
    """What `environment` told, completed by the arguments of `init`, which must not contradict
    it."""
    layout = replace(
        told,
        local_rank=agree("local_rank", request.local_rank, told.local_rank),
        local_world_size=agree("local_world_size", request.local_world_size, told.local_world_size),
    )
    return layout, meeting if meeting is not None else environment.meeting(environ, layout)


def _alone(request: InitRequest) -> Layout:
    if (request.local_rank or 0) > 0 or (request.local_world_size or 1) > 1:
        raise UserError(
            f"init(local_rank={request.local_rank}, local_world_size={request.local_world_size}), "
            "but this process is alone: pass rank= and world_size= too, or leave them out."
        )
    return Layout(0, 1, 0, 1, 0, 1, environment="alone")


def agree(name: str, passed: int | None, told: int | None) -> int | None:
    if passed is not None and told is not None and passed != told:
        raise WorldError(
            f"init({name}={passed}), but the environment or the URL says {name}={told}: leave the "
            "argument out."
        )
    return passed if passed is not None else told


def seconds_of(timeout: timedelta | float | None) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 10**8:
        raise UserError(
            f"timeout={timeout!r} must be a timedelta or a number of seconds above 0, e.g. "
            "timeout=600."
        )
    return float(seconds)


def device_name(device: str | int | torch.device | None) -> str:
    if device is None:
        return "auto"
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    return str(device)
