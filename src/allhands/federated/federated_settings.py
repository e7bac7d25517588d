"""The settings of `Federated`, checked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from allhands.checks import check_choice, check_whole
from allhands.comm.compress import merged_old
from allhands.errors import UserError, did_you_mean
from allhands.federated.algorithms import ALGORITHMS, Algorithm
from allhands.federated.algorithms.fedbuff import FedBuff
from allhands.federated.buffered import BufferedRounds
from allhands.federated.executors.choice import parse
from allhands.federated.failures import check_action
from allhands.federated.privacy import Privacy
from allhands.federated.rounds import Rounds
from allhands.federated.sites.settings import Sites
from allhands.federated.systems import Systems
from allhands.federated.update_compression import UpdateCompression, chosen


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
        self.privacy, self.systems = (
            _make(privacy, Privacy, "privacy"),
            _make(systems, Systems, "systems"),
        )
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
            "allhands.federated.buffered.BufferedRounds, or leave stages out"
        )
    return BufferedRounds


def _object_of(given: Any, known: dict[str, Any], what: str) -> Any:
    """The object that a name, or ``{"name": …, option: …}``, stands for; any other object as it is.

    Raises:
        UserError: no such name, or no such option; lists those that there are.
    """
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
    """An object of `kind` from its options in a dict; None and such an object as they are.

    Raises:
        UserError: it is something else, or an option is unknown or missing; says what there is.
    """
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
