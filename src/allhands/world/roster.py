"""What the processes tell each other when they meet, before any group exists: who came, from which
host, with which GPUs.

Every rank writes one card; rank 0 waits for all of them, checks them against one another, and
publishes the roster or the reason why there is none. So a missing rank is named, on every rank,
instead of leaving the others to time out in a collective, and everything that depends on several
ranks (devices, interfaces, hosts) is decided from the same table everywhere.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError, WorldError

if TYPE_CHECKING:
    from torch.distributed import Store

_GRACE_S = 5.0  # the others wait this much longer than rank 0, so that its verdict reaches them
_LONGEST_PAUSE_S = 0.1


@dataclass(frozen=True)
class Card:
    """What one process says of itself. `gpus` is how many it can see; `gpu` identifies the one when
    it sees only one.
    """

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


def host_id() -> str:
    """A name for this host that no other host of a world shares."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()}/{boot}"


def meet(store: Store, card: Card, place: str, deadline: float) -> list[Card]:
    """All cards in rank order. Collective; `deadline` is on the monotonic clock.

    Raises, on every rank that reached the store, `WorldError` when ranks are missing, came twice,
    or contradict one another, and `UserError` when a host has more workers than GPUs.
    """
    if store.add(f"claim/{card.rank}", 1) > 1:
        stale = (
            " A file that an earlier run left behind looks the same: remove it."
            * place.startswith("file:")
        )
        trouble = (
            f"two processes say that they are rank {card.rank} of {card.world_size} at {place}: "
            "give each its own rank, or, if "
            f"these are two jobs, each its own port.{stale}"
        )
        store.set("trouble", trouble)
        raise WorldError(trouble)
    store.set(f"card/{card.rank}", json.dumps(asdict(card)))
    if card.rank == 0:
        verdict = _collect(store, card, place, deadline)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _await_verdict(store, card, place, deadline)
    if "error" not in verdict:
        return [Card(**entry) for entry in verdict["cards"]]
    store.add("read", 1)
    if card.rank == 0:
        _let_the_others_read(store, verdict["came"])
    raise (UserError if verdict["user"] else WorldError)(verdict["error"])


def _collect(store: Store, own: Card, place: str, deadline: float) -> dict[str, Any]:
    """Rank 0's verdict: `{"cards": …}`, or `{"error": …, "user": whether the user can mend it,
    "came": how many}`."""
    started = time.monotonic()
    cards: dict[int, Card] = {}
    error, pause = None, 0.002
    while True:
        # `check` and not `wait`, because a wait that runs out is logged by torch as if something
        # had broken.
        for rank in range(own.world_size):
            if rank not in cards and store.check([f"card/{rank}"]):
                cards[rank] = Card(**json.loads(store.get(f"card/{rank}")))
        came = [cards[rank] for rank in sorted(cards)]
        twice = store.check(["trouble"])
        error = store.get("trouble").decode() if twice else _contradiction(came)
        if error is not None or len(cards) == own.world_size or time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    missing = [rank for rank in range(own.world_size) if rank not in cards]
    if error is None and missing:
        hosts = ", ".join(
            f"{name} ({count})" for name, count in Counter(card.name for card in came).items()
        )
        error = (
            f"{len(came)} of {own.world_size} processes met at {place} within "
            f"{time.monotonic() - started:.0f} s; missing: rank "
            f"{_ranks(missing)}. Came: {hosts}. Start the missing ranks, or raise timeout= if they "
            "start slowly."
        )
    if error is not None:
        # One that came with another's rank has no card; as many as there are ranks are likely to be
        # here.
        return {"error": error, "user": False, "came": own.world_size if twice else len(came)}
    try:
        check_places(came)
    except (UserError, WorldError) as refused:
        return {"error": str(refused), "user": isinstance(refused, UserError), "came": len(came)}
    return {"cards": [asdict(card) for card in came]}


def _contradiction(cards: list[Card]) -> str | None:
    first = cards[0]
    for card in cards[1:]:
        for what in ("world_size", "backend"):
            mine, theirs = getattr(first, what), getattr(card, what)
            if mine != theirs:
                return (
                    f"rank {first.rank} ({first.name}) has {what}={mine} but rank {card.rank} "
                    f"({card.name}) has "
                    f"{what}={theirs}; every process must be given the "
                    f"same.{_why_backend(what, first, card)}"
                )
    return None


def _why_backend(what: str, first: Card, card: Card) -> str:
    if what != "backend":
        return ""
    seen = f"Rank {first.rank} sees {first.gpus} GPUs, rank {card.rank} sees {card.gpus}"
    return f" ({seen}; device='cpu' uses none.)"


def _await_verdict(store: Store, card: Card, place: str, deadline: float) -> dict[str, Any]:
    started, pause, known = time.monotonic(), 0.002, ""
    try:
        while time.monotonic() < deadline + _GRACE_S:
            if store.check(["verdict"]):
                verdict: dict[str, Any] = json.loads(store.get("verdict"))
                return verdict
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        came = [rank for rank in range(card.world_size) if store.check([f"card/{rank}"])]
        known = f"rank {_ranks(came)} came"
    except RuntimeError as error:
        known = f"then the store, which lives in rank 0 or the launcher, was gone ({error})"
    raise WorldError(
        f"rank {card.rank} waited {time.monotonic() - started:.0f} s at {place} for rank 0 to "
        f"count the {card.world_size} "
        f"processes; {known}. Look at rank 0's output."
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


def place_of(cards: list[Card], rank: int) -> tuple[int, int, int]:
    """`(local_rank, local_world_size, node_rank)` of `rank`: what its environment told, else
    counted over the hosts.
    """
    card = cards[rank]
    hosts = list(dict.fromkeys(other.host for other in cards))
    neighbours = [other.rank for other in cards if other.host == card.host]
    local_rank = card.local_rank if card.local_rank is not None else neighbours.index(rank)
    local_size = card.local_world_size if card.local_world_size is not None else len(neighbours)
    node_rank = card.node_rank if card.node_rank is not None else hosts.index(card.host)
    if local_rank >= local_size:
        raise WorldError(
            f"rank {rank} has local_rank={local_rank} but local_world_size={local_size}; set both "
            "or neither."
        )
    return local_rank, local_size, node_rank


def check_places(cards: list[Card]) -> None:
    """Raise `UserError` when the workers of a host are more than its GPUs, or share the only one
    that they see.

    A worker that sees exactly one GPU was given that one (Slurm's `--gpus-per-task=1`, a
    CUDA_VISIBLE_DEVICES a rank), which is fine as long as the GPUs differ; so they are compared,
    not counted. Raises `WorldError` for local numbers that contradict each other.
    """
    for card in cards:
        _, local_size, _ = place_of(cards, card.rank)
        if card.device != "cuda" or local_size <= card.gpus:
            continue
        twins = [c.rank for c in cards if c.host == card.host and c.gpu == card.gpu and c.gpu]
        if card.gpus == 1 and len(twins) == 1:
            continue
        raise UserError(
            f"{local_size} workers on {card.name} but {card.gpus} GPU{'s' * (card.gpus != 1)} that "
            f"rank {card.rank} can use: "
            f"start at most one worker a GPU (workers={card.gpus}, or -n {card.gpus}), or pass "
            "device='cpu' to train without "
            "GPUs."
        )


def own_card(**known: Any) -> Card:
    """This process's card; `known` are the fields that only the caller knows."""
    return Card(host=f"{host_id()}", name=socket.gethostname() or str(os.getpid()), **known)
