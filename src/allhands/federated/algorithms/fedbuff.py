"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS
2022."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from allhands.checks import check_whole
from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.sums import Sums

if TYPE_CHECKING:
    from allhands.federated.systems import Systems

#: The name of an update that is under way, among what a client keeps: the update, the loss, and a
#: 1.
UNDER_WAY = "under way"
_LOST = 100  # drop-outs for each update that is wanted, before the server steps with what there is


@dataclass
class Events:
    """What happened between two steps of the server.

    Attributes:
        arrivals: client and the version that it began with, in the order in which their updates
            came.
        begun: clients that began with this version.
        lost: those among `begun` who will drop out.
        dropped: clients that dropped out.
    """

    arrivals: list[tuple[int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    dropped: list[int] = field(default_factory=list)


class FedBuff(Algorithm):
    """Clients train all the time, each from the model that it got, and the server steps whenever so
    many updates have come as a cohort is large (`per_round`, the paper's K): ``weights += server_lr
    / K * sum of (1 + staleness)**-exponent * update``.

    Staleness is the number of the server's steps since the client got its model. In virtual time: a
    round is a step of the server, and a client that has arrived or dropped out is replaced at once
    by another, drawn from those that can be had. Events are in the order of their time, then of the
    clients' numbers; what arrives at one moment arrives before others begin. Nobody trains the same
    version twice.

    Args:
        concurrency: clients that train at once (the paper's M_max); None: `per_round`.
        server_lr: the server's step.
        exponent: of the weight of stale updates; 0.5 as in the paper, 0 counts all alike.
        average_buffers: average BatchNorm's statistics as the update; without, a model that has
            some is refused.
    """

    name = "fedbuff"

    def __init__(
        self,
        concurrency: int | None = None,
        server_lr: float = 1.0,
        exponent: float = 0.5,
        average_buffers: bool = False,
    ) -> None:
        check_whole("concurrency", concurrency, otherwise="None for per_round")
        self.concurrency, self.average_buffers = concurrency, average_buffers
        self.server_lr = fraction("server_lr", server_lr, open_low=True)
        self.exponent = fraction("exponent", exponent)
        #: Who is under way: the moment of arrival or of dropping out, client, version, and whether
        #: the update arrives; a heap.
        self.flying: list[tuple[float, int, int, bool]] = []
        self._free = self._draws = 0
        #: Places in the cohort of those that arrive in the step in which they began; set by
        #: `BufferedRounds`.
        self.arriving: set[int] | None = None

    def check(self, server: Server, per_round: int) -> None:
        self.buffer = per_round
        clients, most = server.num_clients, self.concurrency or per_round
        if most > clients:
            raise UserError(
                f"concurrency={most} of {clients} clients; write at most concurrency={clients}"
            )
        if per_round > most and clients < most + per_round - 1:
            raise UserError(
                f"per_round={per_round} updates a step from {most} clients at once need "
                f"{most + per_round - 1} clients, for nobody trains a version twice, and there are "
                f"{clients}; write per_round={most}"
            )
        if server.layout.integers:
            raise UserError(
                f"algorithm='fedbuff' with the integer buffer '{server.layout.integers[0]}', of "
                "which there is no mean over versions; use GroupNorm, or track_running_stats=False"
            )

    def begin(self, server: Server) -> None:
        self.flying, self._draws, self._free = [], 0, self.concurrency or self.buffer

    def client_state(self, server: Server) -> dict[str, int]:
        return {UNDER_WAY: server.layout.length + 2}

    def advance(self, systems: Systems, version: int) -> Events:
        """Let time go on until the buffer is full; computed alike on every rank. Fewer updates come
        only where everyone who could begin has trained this version, or nearly everyone drops
        out."""
        events, taken = Events(), {client for _, client, _, _ in self.flying}
        used: set[int] = set()
        while len(events.arrivals) < self.buffer and len(events.dropped) < _LOST * self.buffer:
            if self._free and (not self.flying or self.flying[0][0] > systems.now):
                begun = systems.draw(self._free, taken | used, "fedbuff", version, self._draws)
                self._draws += 1
                for client in begun:
                    trip = systems.trip(client, version, systems.now)
                    heapq.heappush(
                        self.flying, (systems.now + trip.seconds, client, version, trip.arrives)
                    )
                    if not trip.arrives:
                        events.lost.add(client)
                self._free -= len(begun)
                events.begun += begun
                taken.update(begun)
                used.update(begun)
            if not self.flying:
                if not math.isfinite(systems.opens):
                    break
                systems.wait()
                continue
            systems.now, client, began, arrives = heapq.heappop(self.flying)
            self._free += 1
            taken.discard(client)
            if arrives:
                events.arrivals.append((client, began))
            else:
                events.dropped.append(client)
        return events

    def weight(self, staleness: int) -> float:
        """How much an update counts."""
        return float((1 + staleness) ** -self.exponent)

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        if self.arriving is None:
            raise UserError(
                "algorithm='fedbuff' does not go by cohorts; derive the class that you pass as "
                "stages= from allhands.federated.federated_settings.BufferedRounds"
            )
        updates, kept = trained.updates, trained.own[UNDER_WAY]
        here = torch.tensor(
            [float(slot in self.arriving) for slot in trained.slots], dtype=torch.float64
        )
        self.add(updates, here, sums)
        kept[:, :-2], kept[:, -2], kept[:, -1] = updates, trained.loss.to(kept), (1 - here).to(kept)

    def add(self, updates: torch.Tensor, weights: torch.Tensor, sums: Sums) -> None:
        """Add updates, shape ``[clients, length]``, that arrive in this step."""
        sums.add("update", updates, weights / (sums.scale * self.buffer))

    def aggregate(self, server: Server, sums: Sums) -> None:
        server.weights.add_(self.server_lr * sums.total("update"))

    def state_dict(self) -> dict[str, Any]:
        moments, clients, versions, arrive = (
            zip(*self.flying, strict=True) if self.flying else ((), (), (), ())
        )
        return {
            "moments": torch.tensor(moments, dtype=torch.float64),
            "clients": torch.tensor(clients, dtype=torch.int64),
            "versions": torch.tensor(versions, dtype=torch.int64),
            "arrive": torch.tensor(arrive, dtype=torch.bool),
            "free": self._free,
            "draws": self._draws,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        columns = (state[name].tolist() for name in ("moments", "clients", "versions", "arrive"))
        self.flying = list(zip(*columns, strict=True))  # a heap stays one
        self._free, self._draws = state["free"], state["draws"]
