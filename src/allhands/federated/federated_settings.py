"""The settings of `Federated`, checked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from allhands.checks import check_choice, check_whole
from allhands.comm.compress import merged_old
from allhands.errors import UserError, did_you_mean
from allhands.federated.algorithms import ALGORITHMS, Algorithm
from allhands.federated.algorithms.fedbuff import UNDER_WAY, Events, FedBuff
from allhands.federated.client_schedule import longest_first
from allhands.federated.executors.base import CohortMember
from allhands.federated.executors.choice import parse
from allhands.federated.failures import check_action
from allhands.federated.privacy import Privacy
from allhands.federated.rounds import Rounds
from allhands.federated.sites.settings import Sites
from allhands.federated.sums import Sums
from allhands.federated.systems import Systems
from allhands.federated.update_compression import UpdateCompression, chosen


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
        devices.arrived, devices.late = [client for client, _ in events.arrivals], []
        devices.dropped = events.dropped
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
        # Nothing else is to be kept of those that have arrived.
        if set(self.states.lengths) == {UNDER_WAY}:
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


class FederatedSettings:
    """What `Federated` takes, see there."""

    def __init__(
        self,
        clients: int | None = None,
        partition: Any = "iid",
        per_round: int | None = None,
        rounds: int = 10,
        algorithm: str | dict[str, Any] | Algorithm = "fedavg",
        local_epochs: int = 1,
        local_steps: int | None = None,
        executor: str | dict[str, Any] = "auto",
        evaluate_every: int = 1,
        local_layers: Sequence[str] = (),
        on_bad_update: str = "stop",
        on_client_failure: str = "stop",
        client_retries: int = 2,
        devices_per_client: int = 1,
        compression: str | dict[str, Any] | UpdateCompression | None = None,
        privacy: dict[str, Any] | Privacy | None = None,
        systems: dict[str, Any] | Systems | None = None,
        test_fraction: float | None = None,
        stages: type[Rounds] = Rounds,
        sites: dict[str, Any] | Sites | None = None,
        compress: str | dict[str, Any] | UpdateCompression | None = None,
    ) -> None:
        self.clients, self.per_round, self.rounds = clients, per_round, rounds
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.evaluate_every, self.devices_per_client = evaluate_every, devices_per_client
        self._check_counts()
        self.partition = partition
        self.algorithm = _object_of(algorithm, ALGORITHMS, "algorithm")
        parse(executor)  # raises for a name or an option that there is not
        self.executor, self.stages = executor, _stages_for(self.algorithm, stages)
        if isinstance(local_layers, str):
            raise UserError(
                f"local_layers={local_layers!r}; it must be a list of names: write "
                f"[{local_layers!r}]"
            )
        check_choice("on_bad_update", on_bad_update, ("stop", "skip"))
        how = executor.get("name") if isinstance(executor, dict) else executor
        if devices_per_client > 1 and how not in ("auto", "serial"):
            raise UserError(
                f"devices_per_client={devices_per_client} trains one client after another; leave "
                f"executor={how!r} out"
            )
        check_action(on_client_failure, client_retries)
        self.compression = copy.deepcopy(
            chosen(merged_old(compress, compression, "Federated", "compression"))
        )
        self.privacy = _make(privacy, Privacy, "privacy")
        self.systems = _make(systems, Systems, "systems")
        self.sites: Sites | None = _make(sites, Sites, "sites")
        if self.sites is not None and clients is not None:
            self.sites.check_clients(clients)
        self.on_client_failure, self.client_retries = on_client_failure, client_retries
        self.local_layers, self.on_bad_update = list(local_layers), on_bad_update
        self.test_fraction = test_fraction

    def _check_counts(self) -> None:
        for name in ("rounds", "local_epochs", "evaluate_every", "devices_per_client"):
            check_whole(name, getattr(self, name))
        for name in ("clients", "per_round", "local_steps"):
            check_whole(name, getattr(self, name), otherwise="None")
        clients, per_round = self.clients, self.per_round
        if clients is not None and per_round is not None and per_round > clients:
            raise UserError(
                f"per_round={per_round} of clients={clients}; a round cannot have more clients "
                f"than there are: write per_round={clients}, or None for all of them"
            )


def _stages_for(algorithm: Algorithm, stages: type[Rounds]) -> type[Rounds]:
    """The class of the rounds, where an algorithm needs its own."""
    if not (isinstance(stages, type) and issubclass(stages, Rounds)):
        raise UserError(
            f"stages={stages!r}; it must be a class derived from allhands.federated.Rounds"
        )
    if not isinstance(algorithm, FedBuff) or issubclass(stages, BufferedRounds):
        return stages
    if stages is not Rounds:
        raise UserError(
            f"algorithm='fedbuff' does not go by cohorts: derive {stages.__name__} from "
            "allhands.federated.federated_settings.BufferedRounds, or leave stages out"
        )
    return BufferedRounds


def _object_of(given: Any, known: dict[str, Any], what: str) -> Any:
    """The object that a name, or ``{"name": …, option: …}``, stands for; any other object as it
    is."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict):
        return copy.deepcopy(given)
    options = dict(given)
    name = options.pop("name", None)
    if name not in known:
        raise UserError(
            f"there is no {what} {name!r}{did_you_mean(name, known)} Known are: {', '.join(known)}"
        )
    takes = list(inspect.signature(known[name]).parameters)
    for option in options:
        if option not in takes:
            raise UserError(
                f"the {what} {name!r} has no option {option!r}{did_you_mean(option, takes)} "
                f"It takes: {', '.join(takes) or 'none'}"
            )
    return known[name](**options)


def _make(given: Any, kind: Any, what: str) -> Any:
    """An object of `kind` from its options in a dict; None and such an object as they are."""
    if given is None or isinstance(given, kind):
        return copy.deepcopy(given)
    takes = inspect.signature(kind).parameters
    needs = [name for name, option in takes.items() if option.default is option.empty]
    if not isinstance(given, dict):
        raise UserError(f"{what}={given!r}; write options, {what}={{…}}, of: {', '.join(takes)}")
    for option in [
        *(name for name in given if name not in takes),
        *(name for name in needs if name not in given),
    ]:
        raise UserError(
            f"{what}={given!r}: {'there is no option' if option in given else 'it needs'} "
            f"{option!r}; it takes: {', '.join(takes)}"
        )
    return kind(**given)
