"""Rounds without cohorts: clients train all the time, and a round is a step of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.fedbuff import UNDER_WAY, Events, FedBuff
from allhands.federated.client_schedule import longest_first
from allhands.federated.executors.base import CohortMember
from allhands.federated.rounds import Rounds
from allhands.federated.sums import Sums


class BufferedRounds(Rounds):
    """The rounds of `FedBuff`; options as those of `Rounds`.

    What happens in virtual time is computed first, the same on every rank. Those that begin in a
    round are trained in it, and a rank keeps their updates until they arrive. The cohort is those
    that arrive, in this order, and those that begin and are still under way when the server steps.

    Raises:
        UserError: another algorithm, no `systems`, or ends of rounds that do not exist here.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        systems = options.get("systems")
        if systems is None:
            raise UserError(
                "algorithm='fedbuff' goes by the virtual time of clients' devices; set "
                "systems={'speed': …}, in samples a second"
            )
        if systems.deadline is not None or systems.over_selection:
            raise UserError(
                "algorithm='fedbuff' waits for no cohort; leave deadline and over_selection out of "
                "systems"
            )
        super().__init__(*args, **options)
        if not isinstance(self.algorithm, FedBuff):
            raise UserError(
                "BufferedRounds are those of algorithm='fedbuff', and this is "
                f"{self.algorithm.name!r}; write stages=Rounds"
            )
        self.buffered, self.devices = self.algorithm, systems
        self.events = Events()
        self.history["staleness"] = []

    def select(self, round_: int) -> list[int]:
        """Let time go on until the server steps."""
        events = self.events = self.buffered.advance(self.devices, round_)
        arriving = {client for client, version in events.arrivals if version == round_}
        under_way = [
            client
            for client in events.begun
            if client not in arriving and client not in events.lost
        ]
        #: Places in the cohort of those that are trained in this round.
        self.trained = [
            slot for slot, (_, version) in enumerate(events.arrivals) if version == round_
        ]
        self.buffered.arriving = set(self.trained)
        self.trained += range(len(events.arrivals), len(events.arrivals) + len(under_way))
        return [client for client, _ in events.arrivals] + under_way

    def arrive(self, selected: list[int], round_: int) -> list[int]:
        devices, events = self.devices, self.events
        devices.arrived, devices.late, devices.dropped = (
            [client for client, _ in events.arrivals],
            [],
            events.dropped,
        )
        return selected

    def distribute(self, cohort: Sequence[int]) -> list[CohortMember]:
        steps = [
            self.work.local.num_steps(self.clients.size(cohort[slot])) for slot in self.trained
        ]
        costs = self.costs.predict([cohort[slot] for slot in self.trained], steps)
        dealt = [
            [self.trained[place] for place in places]
            for places in longest_first(costs, self.team.teams)
        ]
        leader = self.team.leader
        self.states.move(
            {cohort[slot]: leader(team) for team, slots in enumerate(dealt) for slot in slots}
        )
        return [CohortMember(cohort[slot], slot) for slot in dealt[self.team.number]]

    def train(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        # First what has been kept: its client may train again in this round.
        for slot, (client, version) in enumerate(self.events.arrivals):
            if version < self.server.round and self.states.owner.get(client) == self.world.rank:
                self._bring(slot, client, self.server.round - version, sums)
        super().train(jobs, sums)
        # Those that are still under way have trained, and have brought nothing yet.
        under_way = [slot for slot in self.trained if slot >= len(self.events.arrivals)]
        if under_way:
            sums.note(under_way, samples=0.0)

    def _bring(self, slot: int, client: int, staleness: int, sums: Sums) -> None:
        kept = self.states.kept.get(client, {}).get(UNDER_WAY)
        # It has failed, or came out with NaN, and was left out.
        if kept is None or not float(kept[-1]):
            return
        self.buffered.add(
            kept[None, :-2],
            torch.tensor([self.buffered.weight(staleness)], dtype=torch.float64),
            sums,
        )
        sums.note([slot], ok=1.0, samples=float(self.clients.size(client)), loss=float(kept[-2]))
        kept[-1] = 0.0

    def one_round(self) -> dict[str, dict[str, float]]:
        values = super().one_round()
        if set(self.states.lengths) == {
            UNDER_WAY
        }:  # nothing else is to be kept of those that have arrived
            flying = {client for _, client, _, _ in self.buffered.flying}
            for client, _ in self.events.arrivals:
                if client not in flying:
                    self.states.kept.pop(client, None)
                    self.states.owner.pop(client, None)
        return values

    def _note(
        self,
        round_: int,
        cohort: list[int],
        figures: dict[str, torch.Tensor],
        values: dict[str, dict[str, float]],
        seconds: float,
    ) -> None:
        super()._note(round_, cohort, figures, values, seconds)
        arrivals = self.events.arrivals
        brought = (figures["ok"] + figures["bad"])[: len(arrivals)].sum()
        self.history["bytes_up"][-1] = self.traffic.up * float(brought)
        self.history["bytes_down"][-1] = self.traffic.down * len(self.events.begun)
        self.history["staleness"].append([round_ - version for _, version in arrivals])
