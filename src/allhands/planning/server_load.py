"""What parameter servers hold and carry, and how long workers wait for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from allhands.comm.traffic import SERVERS, Collective
from allhands.kvstore.optimizers import ChunkOptimizer, spec_of_torch
from allhands.kvstore.placement import place
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
        pieces: of the model, in their order: the server, and bytes.
    """

    count: int
    memory: dict[str, int]
    sent: int
    received: int
    alone: bool
    pieces: Sequence[tuple[int, int]]

    def waiting(
        self,
        step: DryStep,
        busy: float,
        links: Links | MeasuredLinks,
        per_host: int,
        exchange: float | None,
    ) -> float:
        """Seconds of a step in which a worker waits for servers, which are on the workers' hosts in
        turn, as `allhands launch -s` puts them.

        Args:
            step: of one of the workers.
            busy: seconds in which it computes.
            links: between hosts.
            per_host: workers of a host.
            exchange: seconds of all workers' exchanges without a link; None is not measured.
        """
        hosts = math.ceil(step.workers / per_host)
        ways = [sum(_by_server(step, kind).values()) for kind in ("send", "recv")]
        held = sum(size for _, size in self.pieces)
        if exchange is None:
            # It reads and writes gradients, weights and the optimizer's state.
            exchange = (step.workers + _UPDATE) * held / self.count / CARDS[CPU].bandwidth
        # Workers that do not wait for one another seldom exchange at once, but a server that is
        # busy all the time sets the pace.
        own = exchange / step.workers if self.alone else exchange
        if hosts == 1:  # through memory of both
            return max(own, exchange - busy)
        latency = links.seconds(0, "send", 2, hosts)
        up, down = ((links.seconds(size, "send", 2, hosts) - latency) / held for size in ways)
        away = step.workers - per_host
        if self.alone:
            own = self._piped(up, down, 1, 1, own)
            fullest = max(_sums(self.pieces).values())
            return 2 * latency + max(own, max(away * fullest * max(up, down), exchange) - busy)
        mates = min(per_host, step.workers)
        piped = self._piped(up, down, mates, away, exchange)
        # What a host's workers send and what its servers send goes over the same link.
        both = mates * held * (hosts - 1) / hosts * max(up, down)
        of_servers = away * held / min(self.count, hosts) * max(up, down)
        shared = both + of_servers if self.count > 1 else 0.0
        return 2 * latency + max(piped, shared)

    def _piped(self, up: float, down: float, mates: int, away: int, exchange: float) -> float:
        """Seconds until the last new value has come to a worker: pieces follow one another to their
        server, and new values back, once it has a piece of all workers.

        Args:
            up, down: seconds of a byte.
            mates: workers that send over the same link.
            away: workers that a server reaches over its link.
            exchange: seconds of a server, an equal part for each piece: what it takes by the byte
                is done while these come.
        """
        count = Counter(server for server, _ in self.pieces)
        out = back = 0.0
        came, made, gave = (dict.fromkeys(count, 0.0) for _ in range(3))
        for server, size in self.pieces:
            came[server] = max(max(came[server], out) + away * size * up, out + mates * size * up)
            out += mates * size * up
            made[server] = max(made[server], came[server])
            made[server] += exchange / count[server]
            gave[server] = max(gave[server], made[server]) + away * size * down
            back = max(back + mates * size * down, gave[server])
        return back

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        return {name: one for name, one in asdict(self).items() if name != "pieces"} | {
            "peak": self.peak
        }

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
    return ServerLoad(count, memory, sent, received, strategy.alone, _pieces(workload, count))


def _pieces(workload: Workload, servers: int) -> list[tuple[int, int]]:
    """What workers push, one after another."""
    trained = [(name, p) for name, p in workload.model.named_parameters() if p.requires_grad]
    sizes = {name: (p.numel(), p.element_size()) for name, p in sorted(trained)}
    return [
        (one.server, (one.stop - one.start) * sizes[name][1])
        for name, pieces in sorted(place(sizes, [0] * servers).items())
        for one in pieces
    ]


def _sums(pieces: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Bytes by server."""
    found: Counter[int] = Counter()
    for server, size in pieces:
        found[server] += size
    return dict(found)


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
