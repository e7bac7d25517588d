"""What parameter servers hold and carry, and how long workers wait for them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from allhands.comm.traffic import SERVERS, Collective
from allhands.kvstore.optimizers import ChunkOptimizer, spec_of_torch
from allhands.kvstore.placement import chunk_limit
from allhands.planning.dry_step import DryStep, Workload
from allhands.planning.machines import CARDS, CPU, Links
from allhands.planning.measured_links import MeasuredLinks
from allhands.strategies import KVStore, Strategy

# How often an update passes over the weights: AdamW's.
_UPDATE = 6
# Numbers of which an optimizer's state is looked at.
_FEW = 4


@dataclass(frozen=True)
class ServerLoad:
    """Of the fullest parameter server.

    Attributes:
        count: how many servers there are.
        memory: bytes by kind: "weights", "optimizer" and "pushes", which are those of all workers
            where all wait for the last.
        sent, received: bytes in a step of every worker.
        alone: workers do not wait for one another.
        chunks: that it has.
    """

    count: int
    memory: dict[str, int]
    sent: int
    received: int
    alone: bool
    chunks: float

    def waiting(self, step: DryStep, busy: float, links: Links | MeasuredLinks) -> float:
        """Seconds of a step in which a worker waits for servers, each of which is on a host of its
        own.

        Chunks follow one another, so that new values come while gradients are on their way; both
        directions of a link carry at once. A server's link carries what all workers send.

        Args:
            step: of one of the workers.
            busy: seconds in which it computes.
            links: between hosts.
        """

        def carried(size: float) -> float:
            return links.seconds(size, "send", 2, hosts=2)

        own = [carried(sum(_by_server(step, way).values())) for way in ("send", "recv")]
        of_server = [carried(self.received), carried(self.sent)]
        # It reads and writes gradients, weights and the optimizer's state.
        adding = (1 + _UPDATE / step.workers) * self.received / CARDS[CPU].bandwidth
        if self.alone:
            # A server that is busy all the time sets the pace.
            return max(max(own) + min(own) / self.chunks, max(*of_server, adding) - busy)
        up, down = (max(pair) for pair in zip(own, of_server, strict=True))
        # The first values come once a server has all of a chunk.
        return max(up, down, adding) + min(up, down) / self.chunks

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak}

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {size / 1e6:,.4g}" for name, size in self.memory.items())
        several = f"{self.count} servers, the fullest" if self.count > 1 else "1 server"
        return (
            f"{several} holds at most {self.peak / 1e6:,.4g} MB ({kinds}), gets "
            f"{self.received / 1e6:,.4g} MB and sends {self.sent / 1e6:,.4g} MB in a step"
        )


def load_of(strategy: Strategy, step: DryStep, workload: Workload) -> ServerLoad | None:
    """What the servers of a strategy have to do; None where it has none.

    Args:
        strategy: of the training.
        step: of one of the workers, which are alike.
        workload: what is trained.
    """
    count = getattr(strategy, "servers", None)
    if not isinstance(strategy, KVStore) or not count:
        return None
    gets, gives = _by_server(step, "send"), _by_server(step, "recv")
    weights = sum(one.nbytes for one in workload.model.parameters() if one.requires_grad)
    held = math.ceil(weights * max(gets.values()) / sum(gets.values()))
    memory = {"weights": held}
    if strategy.takes_step:
        memory["optimizer"] = round(held * _states_of(workload.optimizer))
    if strategy.options.get("mirror"):  # each has those of the server before it, too
        memory = {name: 2 * size for name, size in memory.items()}
    # Without waiting, a push is applied when it has come.
    memory["pushes"] = held if strategy.alone else step.workers * held
    sent, received = (step.workers * max(ways.values()) for ways in (gives, gets))
    chunks = max(1.0, held / chunk_limit(weights, count))
    return ServerLoad(count, memory, sent, received, strategy.alone, chunks)


def without_servers(step: DryStep) -> DryStep:
    return replace(step, events=[one for one in step.events if not _is_with_server(one[1])])


def _by_server(step: DryStep, kind: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for one in step.transfers:
        if _is_with_server(one) and one.kind == kind:
            found[one.peer] += one.payload
    return found


def _is_with_server(event: Any) -> bool:
    """Whether it goes to a parameter server, or comes from one."""
    return isinstance(event, Collective) and event.group == SERVERS


def _states_of(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of an optimizer's state for each byte of weights."""
    spec, _ = spec_of_torch(optimizer)
    weights = torch.zeros(_FEW)
    chunk = ChunkOptimizer(spec, 0, weights)
    chunk.step(torch.ones(_FEW), None)
    tensors, _ = chunk.state()
    return sum(one.nbytes for one in tensors.values()) / weights.nbytes
