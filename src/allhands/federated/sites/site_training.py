"""What `SupervisedRunner.train` does on the server of a run across sites, in place of
`allhands.federated.federated_training.train`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from allhands.data import preserved_generators
from allhands.data.build import Source, sources_from_datasets
from allhands.errors import UserError
from allhands.federated.algorithms import Server
from allhands.federated.executors import ExecutorContext
from allhands.federated.federated_training import (
    evaluation,
    local_training,
    number_of_rounds,
    trained_source,
)
from allhands.federated.round_loop import RoundLoop
from allhands.federated.rounds import Evaluate
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.federated.sites.arrays import check_dtype
from allhands.federated.sites.definition import check
from allhands.federated.sites.describe import describe
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.executor import SiteExecutor
from allhands.federated.sites.post import Post
from allhands.federated.sites.roll import Roll
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.site_rounds import SiteClients, SiteRounds
from allhands.federated.sites.update_validator import UpdateValidator
from allhands.federated.strategy import Federated
from allhands.loop.joining import ends_with_a_worker, in_elastic_job
from allhands.loop.reporter import Reporter
from allhands.loop.workers import Plan
from allhands.runner.supervised import SupervisedRunner
from allhands.runner.train_settings import TrainSettings
from allhands.world import World

EVENTS = "events.jsonl"  # in the logdir


@dataclass(frozen=True)
class Across:
    """How the sites of a run are reached.

    Attributes:
        grid: Flower's `Grid`.
        allowed: public key by name; None where nodes have no keys.
        tokens: the file of the sites' tokens; None: none are asked for.
        data: whether the server has data of its own, on which it measures the global model.
    """

    grid: Any
    allowed: Mapping[str, bytes] | None = None
    tokens: Path | None = None
    data: bool = False

    def names(self, settings: Sites) -> list[str]:
        """The sites, in the order of the clients.

        Raises:
            UserError: nobody has said which there are, or one that is named has no key.
        """
        if settings.names is None and self.allowed is None:
            raise UserError(
                "who are the sites? Write strategy.sites.names: [a, b], or give --sites FILE, a "
                "list of their keys"
            )
        names = list(settings.names if settings.names is not None else self.allowed or ())
        without = [name for name in names if self.allowed is not None and name not in self.allowed]
        if without:
            raise UserError(
                f"sites.names has {', '.join(map(repr, without))}, of which the list of sites "
                "(--sites) has no key; add a line there, or take the name out"
            )
        return names


def across_sites(strategy: Federated, across: Across) -> Federated:
    """The same training, of which the clients are sites: what `SupervisedRunner.train` takes on the
    server.
    """
    check(strategy)
    names = across.names(strategy.sites or Sites())
    if strategy.clients not in (None, len(names)):
        raise UserError(
            f"clients={strategy.clients} and {len(names)} sites; leave clients out, or set it to "
            "null"
        )
    made = copy.copy(strategy)
    made.train_instead = lambda: partial(train, across)  # type: ignore[method-assign]
    return made


class SiteRunner(SupervisedRunner):
    """A runner that trains in this process, which is the one that Flower has started."""

    def _plan(self, distributed: Any, count: int | None) -> Plan:
        return Plan(distributed, 0, self.device)


class SiteLoop(RoundLoop):
    """Rounds whose first line says what is known before any site is there."""

    def announce(self, note: str) -> None:
        rounds = self.rounds
        assert isinstance(rounds, SiteRounds)
        self.reporter.line(
            f"allhands: federated, {rounds.algorithm.name}, across {len(rounds.clients)} sites "
            f"({', '.join(rounds.roll.names)}); {rounds.per_round} a round, {rounds.roll.needed} "
            f"must be there; {rounds.rounds} rounds; seed {self.settings.seed}"
        )
        if in_elastic_job():
            self.reporter.line(
                ends_with_a_worker(
                    "its one worker is the server of the sites; a site that is lost does not end it"
                )
            )
        if note:
            self.reporter.line(note)


class _Elsewhere(Dataset[Any]):
    """The samples that sites train on, of which the server has none."""

    def __len__(self) -> int:
        return 0


def train(
    across: Across,
    runner: Any,
    settings: TrainSettings,
    world: World,
    reporter: Reporter,
    shipped: bool,
) -> dict[str, Any]:
    """All rounds, from wherever the last checkpoint is; the signature, after `across`, is that of
    every training."""
    strategy, model = settings.strategy, settings.model
    assert isinstance(strategy, Federated)
    if world.world_size != 1:
        raise UserError(
            f"the server is one process, and this is one of {world.world_size}; start it by "
            "`allhands federated server`"
        )
    settings.save_every = settings.save_every or (1 if settings.logdir is not None else None)
    sites = strategy.sites or Sites()
    events = EventLog(None if settings.logdir is None else settings.logdir / EVENTS)
    home = next(model.parameters()).device
    try:
        with preserved_generators():
            sources = _sources(settings, across.data)
            model.to(world.device)
            if isinstance(settings.criterion, nn.Module):
                settings.criterion.to(world.device)
            evaluate = evaluation(runner, settings, sources, world, reporter)
            rounds = _rounds(
                across, sites, runner, settings, world, events, trained_source(sources), evaluate
            )
            measured = [name for name, source in sources.items() if not source.trains]
            history = SiteLoop(
                settings,
                world,
                reporter,
                rounds,
                measured + (["clients"] if rounds.measures else []),
            ).run()
        events.say("end", rounds=len(history["round"]), reason="finished")
    except BaseException as error:
        events.say("end", rounds=0, reason=str(error) or type(error).__name__)
        raise
    finally:
        events.close()
        model.to(home)
        if isinstance(settings.criterion, nn.Module):
            settings.criterion.to(home)
    return {"history": history}


def _sources(settings: TrainSettings, data: bool) -> dict[str, Source]:
    """The server's loaders: those that are evaluated, where it has data; and what says how large
    the sites' batches are."""
    if data:
        sources = settings.data.sources(settings.seed)
        kept = trained_source(sources)
        kept.dataset = _Elsewhere()
        return sources
    options: dict[str, Any] = dict(settings.data.datasets or {})
    return sources_from_datasets(
        {key: options[key] for key in ("batch_size", "drop_last") if key in options}
        | {"train": _Elsewhere()},
        settings.seed,
    )


def _rounds(
    across: Across,
    sites: Sites,
    runner: Any,
    settings: TrainSettings,
    world: World,
    events: EventLog,
    source: Source,
    evaluate: Evaluate | None,
) -> SiteRounds:
    strategy: Any = settings.strategy
    model, clients = settings.model, SiteClients(across.names(sites))
    local = local_training(settings, strategy, source, runner)
    layout = RowLayout(model, local.optimizer.groups)
    check_dtype(layout.parameters[0].name, layout.dtype)
    server = Server.of(model, layout, world.device, len(clients), settings.seed)
    work = ExecutorContext(
        copy.deepcopy(model),
        local,
        strategy.algorithm,
        Samples(source.dataset, world.device),
        clients,
        settings.seed,
    )
    post = Post(across.grid, events)
    description = json.dumps(describe(work, server, strategy, sites.labels))
    roll = Roll(
        across.grid,
        clients.names or [],
        across.allowed,
        across.tokens,
        sites,
        events,
        post,
        description,
    )
    executor = SiteExecutor(work, server, roll, post, events, sites)
    rounds = SiteRounds(
        work,
        server,
        executor,
        world,
        per_round=strategy.per_round or len(clients),
        rounds=number_of_rounds(settings, strategy),
        evaluate=evaluate,
        evaluate_every=strategy.evaluate_every,
        local_layers=strategy.local_layers,
        on_bad_update=sites.on_bad,
        on_client_failure="skip",
        compression=strategy.compression,
        privacy=strategy.privacy,
        measures=strategy.test_fraction is not None or evaluate is None,
    )
    clip = None if strategy.privacy is None else strategy.privacy.clip
    executor.validator = UpdateValidator(layout, sites, len(server.integers), server.own, clip)
    return rounds
