"""The membership of a world, agreed before any group exists: which ranks came, from which hosts,
with which GPUs.

Every rank writes a description of itself; rank 0 waits for all of them, checks them against one
another, and publishes the membership or the reason why there is none. So a missing rank is named,
on every rank, instead of leaving the others to time out in a collective, and everything that
depends on several ranks (devices, interfaces, hosts) is decided from the same table everywhere."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError, WorldError

if TYPE_CHECKING:
    from torch.distributed import Store

_GRACE_S = 5.0  # the others wait this much longer than rank 0, so that its verdict reaches them
_LONGEST_PAUSE_S = 0.1


@dataclass(frozen=True)
class Member:
    """One process of a world, as it describes itself. `gpus` is how many it can see; `gpu`
    identifies the one when it sees only one."""

    rank: int
    world_size: int
    host: str  # the host's name and boot number: two machines may both be called localhost
    name: str
    backend: str
    device: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    gpus: int = 0
    gpu: str = ""
    address: str = ""  # its own address on the route to rank 0, "" when unknown
    cores: str = ""  # those that it may use, see `cores.own_mask`


def host_id() -> str:
    """A name for this host that no other host of a world shares."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()}/{boot}"


class SupersededError(WorldError):
    """The world that was to be made is not to be made any more."""


def _never() -> bool:
    return False


def meet(
    store: Store,
    member: Member,
    place: str,
    deadline: float,
    superseded: Callable[[], bool] = _never,
) -> list[Member]:
    """All members in rank order. Collective; `deadline` is on the monotonic clock. It is given up
    with `SupersededError` once `superseded` says so.

    Raises, on every rank that reached the store, `WorldError` when ranks are missing, came twice,
    or contradict one another, and `UserError` when a host has more workers than GPUs.
    """
    if store.add(f"claim/{member.rank}", 1) > 1:
        stale = (
            " A file that an earlier run left behind looks the same: remove it."
            * place.startswith("file:")
        )
        trouble = (
            f"two processes say that they are rank {member.rank} of {member.world_size} at "
            f"{place}: give each its own rank, or, if these are two jobs, each its own port.{stale}"
        )
        store.set("trouble", trouble)
        raise WorldError(trouble)
    store.set(f"member/{member.rank}", json.dumps(asdict(member)))
    if member.rank == 0:
        verdict = _collect(store, member, place, deadline, superseded)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _await_verdict(store, member, place, deadline, superseded)
    if "error" not in verdict:
        return [Member(**entry) for entry in verdict["members"]]
    store.add("read", 1)
    if member.rank == 0:
        _let_the_others_read(store, verdict["came"])
    raise (UserError if verdict["user"] else WorldError)(verdict["error"])


def _collect(
    store: Store, own: Member, place: str, deadline: float, superseded: Callable[[], bool]
) -> dict[str, Any]:
    """Rank 0's verdict: `{"members": …}`, or `{"error": …, "user": whether the user can mend it,
    "came": how many}`."""
    started = time.monotonic()
    members: dict[int, Member] = {}
    error, pause = None, 0.002
    while True:
        # `check` and not `wait`, because a wait that runs out is logged by torch as if something
        # had broken.
        for rank in range(own.world_size):
            if rank not in members and store.check([f"member/{rank}"]):
                members[rank] = Member(**json.loads(store.get(f"member/{rank}")))
        came = [members[rank] for rank in sorted(members)]
        twice = store.check(["trouble"])
        error = store.get("trouble").decode() if twice else _contradiction(came)
        if error is not None or len(members) == own.world_size or time.monotonic() > deadline:
            break
        _check_wanted(superseded)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    missing = [rank for rank in range(own.world_size) if rank not in members]
    if error is None and missing:
        hosts = ", ".join(
            f"{name} ({count})" for name, count in Counter(member.name for member in came).items()
        )
        error = (
            f"{len(came)} of {own.world_size} processes met at {place} within "
            f"{time.monotonic() - started:.0f} s; missing: rank {_ranks(missing)}. Came: {hosts}. "
            "Start the missing ranks, or raise timeout= if they start slowly."
        )
    if error is not None:
        # One that came with another's rank has no entry; as many as there are ranks are likely to
        # be here.
        return {"error": error, "user": False, "came": own.world_size if twice else len(came)}
    try:
        check_places(came)
    except (UserError, WorldError) as refused:
        return {"error": str(refused), "user": isinstance(refused, UserError), "came": len(came)}
    return {"members": [asdict(member) for member in came]}


def _contradiction(members: list[Member]) -> str | None:
    first = members[0]
    for member in members[1:]:
        for what in ("world_size", "backend"):
            mine, theirs = getattr(first, what), getattr(member, what)
            if mine != theirs:
                return (
                    f"rank {first.rank} ({first.name}) has {what}={mine} but rank {member.rank} "
                    f"({member.name}) has {what}={theirs}; every process must be given the "
                    f"same.{_why_backend(what, first, member)}"
                )
    return None


def _why_backend(what: str, first: Member, member: Member) -> str:
    if what != "backend":
        return ""
    seen = f"Rank {first.rank} sees {first.gpus} GPUs, rank {member.rank} sees {member.gpus}"
    return f" ({seen}; device='cpu' uses none.)"


def _check_wanted(superseded: Callable[[], bool]) -> None:
    if superseded():
        raise SupersededError("the members of the world have changed again")


def _await_verdict(
    store: Store, member: Member, place: str, deadline: float, superseded: Callable[[], bool]
) -> dict[str, Any]:
    started, pause, known = time.monotonic(), 0.002, ""
    try:
        while time.monotonic() < deadline + _GRACE_S:
            if store.check(["verdict"]):
                verdict: dict[str, Any] = json.loads(store.get("verdict"))
                return verdict
            _check_wanted(superseded)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        came = [rank for rank in range(member.world_size) if store.check([f"member/{rank}"])]
        known = f"rank {_ranks(came)} came"
    except RuntimeError as error:
        known = f"then the store, which lives in rank 0 or the launcher, was gone ({error})"
    raise WorldError(
        f"rank {member.rank} waited {time.monotonic() - started:.0f} s at {place} for rank 0 to "
        f"count the {member.world_size} processes; {known}. Look at rank 0's output."
    )


def _let_the_others_read(store: Store, came: int) -> None:
    """Keep the store, which lives in this process, until the others know the reason; five seconds
    at most."""
    deadline = time.monotonic() + 5.0
    while store.add("read", 0) < came and time.monotonic() < deadline:
        time.sleep(0.05)


def _ranks(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"


def place_of(members: list[Member], rank: int) -> tuple[int, int, int]:
    """`(local_rank, local_world_size, node_rank)` of `rank`: what its environment told, else
    counted over the hosts.
    """
    member = members[rank]
    hosts = list(dict.fromkeys(other.host for other in members))
    neighbours = [other.rank for other in members if other.host == member.host]
    local_rank = member.local_rank if member.local_rank is not None else neighbours.index(rank)
    local_size = member.local_world_size if member.local_world_size is not None else len(neighbours)
    node_rank = member.node_rank if member.node_rank is not None else hosts.index(member.host)
    if local_rank >= local_size:
        raise WorldError(
            f"rank {rank} has local_rank={local_rank} but local_world_size={local_size}; set both "
            "or neither."
        )
    return local_rank, local_size, node_rank


def check_places(members: list[Member]) -> None:
    """Raise `UserError` when the workers of a host are more than its GPUs, or share the only one
    that they see.

    A worker that sees exactly one GPU was given that one (Slurm's `--gpus-per-task=1`, a
    CUDA_VISIBLE_DEVICES a rank), which is fine as long as the GPUs differ; so they are compared,
    not counted. Raises `WorldError` for local numbers that contradict each other.
    """
    for member in members:
        _, local_size, _ = place_of(members, member.rank)
        if member.device != "cuda" or local_size <= member.gpus:
            continue
        twins = [c.rank for c in members if c.host == member.host and c.gpu == member.gpu and c.gpu]
        if member.gpus == 1 and len(twins) == 1:
            continue
        raise UserError(
            f"{local_size} workers on {member.name} but {member.gpus} "
            f"GPU{'s' * (member.gpus != 1)} that rank {member.rank} can use: start at most one "
            f"worker a GPU (workers={member.gpus}, or -n {member.gpus}), or pass device='cpu' to "
            "train without GPUs."
        )


def own_member(**known: Any) -> Member:
    """This process as a member; `known` are the fields that only the caller knows."""
    return Member(host=f"{host_id()}", name=socket.gethostname() or str(os.getpid()), **known)
