"""What the processes tell each other when they meet, before any group exists: who came, from which host, with
which GPUs.

Every rank writes one card; rank 0 waits for all of them, checks them against one another, and publishes the
roster or the reason why there is none. So a missing rank is named, on every rank, instead of leaving the
others to time out in a collective, and everything that depends on several ranks (devices, interfaces, hosts)
is decided from the same table everywhere.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import UserError, WorldError

if TYPE_CHECKING:
    from torch.distributed import Store

_GRACE_S = 5.0  # the others wait this much longer than rank 0, so that its verdict reaches them


@dataclass(frozen=True)
class Card:
    """What one process says of itself. `gpus` is how many it can see; `gpu` identifies the one when it sees
    only one.
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

    Raises `WorldError`, on every rank that reached the store, when ranks are missing, came twice, or
    contradict one another.
    """
    claim = f"claim/{card.rank}"
    if store.add(claim, 1) > 1:
        stale = (
            " A file that an earlier run left behind looks the same: remove it."
            if place.startswith("file://")
            else ""
        )
        trouble = (
            f"two processes say that they are rank {card.rank} of {card.world_size} at {place}: give each "
            f"its own rank, or, if these are two jobs, each its own port.{stale}"
        )
        store.set("trouble", trouble)
        raise WorldError(trouble)
    store.set(f"card/{card.rank}", json.dumps(asdict(card)))
    if card.rank == 0:
        verdict = _collect(store, card, place, deadline)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _await_verdict(store, card, place, deadline)
    if "error" in verdict:
        if card.rank == 0:
            _let_the_others_read(store, verdict["came"])
        else:
            store.add("read", 1)
        raise WorldError(verdict["error"])
    return [Card(**entry) for entry in verdict["cards"]]


def _collect(store: Store, own: Card, place: str, deadline: float) -> dict[str, Any]:
    started = time.monotonic()
    keys = [f"card/{rank}" for rank in range(own.world_size)]
    missing = _wait_for_all(store, keys, deadline)
    cards = [
        Card(**json.loads(store.get(keys[rank]))) for rank in range(own.world_size) if rank not in missing
    ]
    error = store.get("trouble").decode() if store.check(["trouble"]) else _contradiction(cards)
    if error is None and missing:
        hosts = ", ".join(f"{name} ({count})" for name, count in Counter(card.name for card in cards).items())
        error = (
            f"{len(cards)} of {own.world_size} processes met at {place} within "
            f"{time.monotonic() - started:.0f} s; missing: rank {_ranks(missing)}. Came: {hosts}. Start the "
            "missing ranks, or raise timeout= if they start slowly."
        )
    if error is not None:
        return {"error": error, "came": len(cards)}
    return {"cards": [asdict(card) for card in cards]}


def _wait_for_all(store: Store, keys: list[str], deadline: float) -> list[int]:
    """The numbers of the keys that are still missing at the deadline; none once all are there."""
    missing = list(range(len(keys)))
    while missing:
        left = deadline - time.monotonic()
        if left <= 0:
            return missing
        # One key at a time in short waits: a contradiction between ranks that have come should not wait for
        # the last one.
        try:
            store.wait([keys[missing[0]]], timedelta(seconds=min(left, 1.0)))
        except RuntimeError:  # DistStoreError, and plain RuntimeError from the file store: not there yet
            pass
        else:
            missing.pop(0)
            continue
        missing = [number for number in missing if not store.check([keys[number]])]
        present = [json.loads(store.get(key)) for number, key in enumerate(keys) if number not in missing]
        if store.check(["trouble"]) or _contradiction([Card(**entry) for entry in present]):
            return missing
    return missing


def _contradiction(cards: list[Card]) -> str | None:
    first = cards[0]
    for card in cards[1:]:
        for what in ("world_size", "backend"):
            mine, theirs = getattr(first, what), getattr(card, what)
            if mine != theirs:
                return (
                    f"rank {first.rank} ({first.name}) has {what}={mine} but rank {card.rank} ({card.name}) "
                    f"has {what}={theirs}; every process must be given the "
                    f"same.{_why_backend(what, first, card)}"
                )
    return None


def _why_backend(what: str, first: Card, card: Card) -> str:
    if what != "backend":
        return ""
    seen = f"Rank {first.rank} sees {first.gpus} GPUs, rank {card.rank} sees {card.gpus}"
    return f" ({seen}; device='cpu' uses none.)"


def _await_verdict(store: Store, card: Card, place: str, deadline: float) -> dict[str, Any]:
    left = max(deadline - time.monotonic(), 0.0) + _GRACE_S
    try:
        store.wait(["verdict"], timedelta(seconds=left))
        verdict: dict[str, Any] = json.loads(store.get("verdict"))
    except RuntimeError as error:
        came = [rank for rank in range(card.world_size) if _is_there(store, f"card/{rank}")]
        known = f"rank {_ranks(came)} came" if came else "the store no longer answers"
        raise WorldError(
            f"rank {card.rank} waited {left:.0f} s at {place} for rank 0 to count the {card.world_size} "
            f"processes; {known}. Look at rank 0's output. ({error})"
        ) from None
    return verdict


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _let_the_others_read(store: Store, came: int) -> None:
    """Keep the store, which lives in this process, until the others know the reason; two seconds at most."""
    deadline = time.monotonic() + 2.0
    while store.add("read", 0) < came - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def _ranks(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"


def place_of(cards: list[Card], rank: int) -> tuple[int, int, int]:
    """`(local_rank, local_world_size, node_rank)` of `rank`: what its environment told, else counted over the
    hosts.
    """
    card = cards[rank]
    hosts = list(dict.fromkeys(other.host for other in cards))
    neighbours = [other.rank for other in cards if other.host == card.host]
    local_rank = card.local_rank if card.local_rank is not None else neighbours.index(rank)
    local_size = card.local_world_size if card.local_world_size is not None else len(neighbours)
    node_rank = card.node_rank if card.node_rank is not None else hosts.index(card.host)
    if local_rank >= local_size:
        raise WorldError(
            f"rank {rank} has local_rank={local_rank} but local_world_size={local_size}; set both or neither."
        )
    return local_rank, local_size, node_rank


def check_gpus(cards: list[Card]) -> None:
    """Raise `UserError` when the workers of a host are more than its GPUs, or share the only one that they
    see.

    A worker that sees exactly one GPU was given that one (Slurm's `--gpus-per-task=1`, a CUDA_VISIBLE_DEVICES
    a rank), which is fine as long as the GPUs differ; so they are compared, not counted.
    """
    for card in cards:
        if not card.device.startswith("cuda") or ":" in card.device:
            continue
        _, local_size, _ = place_of(cards, card.rank)
        if local_size <= card.gpus:
            continue
        twins = [c.rank for c in cards if c.host == card.host and c.gpu == card.gpu and c.gpu]
        if card.gpus == 1 and len(twins) == 1:
            continue
        raise UserError(
            f"{local_size} workers on {card.name} but {card.gpus} GPU{'s' * (card.gpus != 1)} that rank "
            f"{card.rank} can use: start at most one worker a GPU (workers={card.gpus}, or -n {card.gpus}), "
            "or pass device='cpu' to train without GPUs."
        )


def own_card(**known: Any) -> Card:
    """This process's card; `known` are the fields that only the caller knows."""
    return Card(host=f"{host_id()}", name=socket.gethostname() or str(os.getpid()), **known)
