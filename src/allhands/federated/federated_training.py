"""`SupervisedRunner.train(distributed=Federated(…))`: the training in each worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from allhands.comm import broadcast_tensors
from allhands.data import build_feeds, preserved_generators
from allhands.data.build import Source
from allhands.data.epochs import EpochListeners
from allhands.errors import UserError
from allhands.federated.algorithms import Server
from allhands.federated.clients import Clients
from allhands.federated.elastic_rounds import ElasticRounds
from allhands.federated.executors import Executor, ExecutorContext
from allhands.federated.executors.choice import parse
from allhands.federated.executors.shared import Shared
from allhands.federated.federated_settings import FederatedSettings
from allhands.federated.local_training import LocalOptimizer, LocalTraining
from allhands.federated.partitions import partition_of
from allhands.federated.round_loop import RoundLoop
from allhands.federated.rounds import Evaluate, Rounds
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.federated.team import Team
from allhands.loop.admission import terms_of
from allhands.loop.joining import regrouping_of
from allhands.loop.reporter import Reporter
from allhands.runner.evaluation import Forward, evaluate_feed, fitting, loss_rule, metrics_take
from allhands.runner.metrics import LoaderMetrics, all_metrics, metrics_by_loader
from allhands.runner.train_settings import TrainSettings
from allhands.step import Precision, batch_loss
from allhands.world import World

#: The samples, who trains on which of them, and on which each client's model is measured.
Divided = tuple[Samples, Clients, Clients | None]


def divided(strategy: FederatedSettings, samples: Samples, seed: int) -> Divided:
    clients = partition_of(strategy.partition, samples, strategy.clients, seed)
    if strategy.sites is not None:
        strategy.sites.check_clients(len(clients))
    if strategy.test_fraction is None:
        return samples, clients, None
    return samples, *clients.split(strategy.test_fraction, seed)


def train(
    runner: Any,
    settings: TrainSettings,
    world: World,
    reporter: Reporter,
    shipped: bool,
    divide: Callable[[FederatedSettings, Samples, int], Divided] = divided,
) -> dict[str, Any]:
    """The training that a `SupervisedRunner` was asked for, in rounds; called on every rank.
    `divide` says who has which samples."""
    strategy = settings.strategy
    assert isinstance(strategy, FederatedSettings)
    model = settings.model
    home = next(model.parameters()).device
    with preserved_generators():
        sources = settings.data.sources(settings.seed)
        source = trained_source(sources)
        samples = samples_of(source, world.device)
        if source.options.get("num_workers") and samples.tensors is None:
            reporter.line(
                f"note: loader '{source.name}' has num_workers={source.options['num_workers']}; "
                "clients' samples are read in the "
                "workers that train, and only loaders that are evaluated have loader processes"
            )
        samples, clients, tests = divide(strategy, samples, settings.seed)
        local = local_training(settings, strategy, source, runner, reporter.line)
        clients, local, per_round = strategy.algorithm.prepare(
            clients, local, strategy.per_round or len(clients)
        )
        # The algorithm has put all samples together.
        if tests is not None and len(clients) != len(tests):
            tests = Clients([tests.indices])
        model.to(world.device)
        elastic = None
        regrouping = regrouping_of(
            terms_of(ElasticRounds.trainings + 1, {"model": model}, strategy.name)
        )

        def make_evaluate() -> Evaluate | None:
            return evaluation(runner, settings, sources, world, reporter)

        if regrouping is not None:
            elastic = ElasticRounds(world, regrouping, make_evaluate)
        if isinstance(settings.criterion, nn.Module):
            settings.criterion.to(world.device)
        if elastic is None or not elastic.joins:
            broadcast_tensors([*model.parameters(), *model.buffers()], world)
        layout = RowLayout(model, local.optimizer.groups)
        server = Server.of(model, layout, world.device, len(clients), settings.seed)
        # The executor's own: it binds the weights into rows and replaces layers of dropout.
        work = ExecutorContext(
            copy.deepcopy(model), local, strategy.algorithm, samples, clients, settings.seed
        )
        team = Team.of(world, strategy.devices_per_client)
        if team.size == 1:
            executor = make_executor(strategy.executor, work, server)
        else:
            executor = Shared(work, server, team)
        rounds = made_rounds(
            strategy,
            work,
            server,
            executor,
            world,
            per_round=per_round,
            rounds=number_of_rounds(settings, strategy),
            evaluate=make_evaluate(),
            tests=tests,
            team=team,
        )
        evaluated = [name for name, source in sources.items() if not source.trains] + (
            ["clients"] if tests is not None else []
        )
        if settings.metrics and not evaluated:
            names = ", ".join(all_metrics(settings.metrics))
            reporter.line(
                f"note: metrics ({names}) are of loaders that are evaluated, and there is none; of "
                "the clients' training only the loss is known. Pass a loader 'valid', or "
                "Federated(test_fraction=0.2)"
            )
        history = RoundLoop(settings, world, reporter, rounds, evaluated, elastic).run()
    model.to(home)
    if isinstance(settings.criterion, nn.Module):
        settings.criterion.to(home)
    return {"history": history}


def made_rounds(
    strategy: FederatedSettings,
    work: ExecutorContext,
    server: Server,
    executor: Executor,
    world: World,
    **options: Any,
) -> Rounds:
    """The rounds that a strategy asks for; `options` are the others of `Rounds`."""
    return strategy.stages(
        work,
        server,
        executor,
        world,
        evaluate_every=strategy.evaluate_every,
        local_layers=strategy.local_layers,
        on_bad_update=strategy.on_bad_update,
        on_client_failure=strategy.on_client_failure,
        client_retries=strategy.client_retries,
        compression=strategy.compression,
        privacy=strategy.privacy,
        systems=strategy.systems,
        **options,
    )


def local_training(
    settings: Any,
    strategy: FederatedSettings,
    source: Source,
    runner: Any,
    say: Callable[[str], None] | None = None,
) -> LocalTraining:
    """How every client trains, wherever it is.

    Args:
        settings: has the model, the criterion, the optimizer and the options of `TrainSettings`.
        strategy: epochs or steps.
        source: size of batches.
        runner: its `handle_batch` becomes the clients' `forward`.
        say: see `allhands.runner.evaluation.fitting`.
    """
    steps = strategy.local_steps
    return LocalTraining(
        criterion=batch_loss(settings.criterion),
        optimizer=LocalOptimizer.like(settings.optimizer, settings.model),
        batch_size=source.batch_size,
        epochs=strategy.local_epochs,
        steps=min(3, steps or 3) if settings.check else steps,
        clip_norm=settings.clip_norm,
        forward=fitting(runner.handle_batch, settings.criterion, say, runner.output_member),
        drop_last=source.drop_last,
        precision=settings.precision,
    )


def number_of_rounds(settings: Any, strategy: FederatedSettings) -> int:
    """How many rounds are trained."""
    return min(3, strategy.rounds) if settings.check else strategy.rounds


def make_executor(given: str | dict[str, Any], work: ExecutorContext, server: Server) -> Executor:
    """The executor of a name, or of ``{"name": …, option: …}``. Raises `UserError` when it cannot
    train these clients."""
    kind, options = parse(given)
    refusal = kind.refuses(work, server)
    if refusal is not None:
        raise UserError(
            f"executor={kind.name!r} cannot train these clients: {refusal}; write executor='auto'"
        )
    return kind(work, server, **options)


def trained_source(sources: dict[str, Source]) -> Source:
    """The one whose samples clients train on. Raises `UserError` unless there is one, whose samples
    can be dealt out."""
    trained = [source for source in sources.values() if source.trains]
    if len(trained) != 1:
        raise UserError(
            f"federated training deals out one data set, and there are {len(trained)} whose name "
            "begins with 'train'"
        )
    (source,) = trained
    for name in ("sampler", "batch_sampler"):
        if getattr(source, name) is not None:
            raise UserError(
                f"the loader '{source.name}' has a {name}; clients draw from their own samples in "
                "an order of their own: remove it, or say who has which samples with partition="
            )
    if source.options.get("worker_init_fn") is not None and source.options.get("num_workers"):
        raise UserError(
            f"the loader '{source.name}' has a worker_init_fn, which loader processes call, and "
            "clients have none: remove it, and let the data set or collate_fn do what it does; "
            "random draws there are seeded already"
        )
    return source


def test_source(sources: Mapping[str, Source]) -> Source | None:
    """The one on whose samples a client's model is measured; None where there is none."""
    others = [source for source in sources.values() if not source.trains]
    return next((one for one in others if one.name == "valid"), others[0] if others else None)


def samples_of(source: Source, device: torch.device) -> Samples:
    """The samples of a loader, in batches as its collate function makes them."""
    listeners = EpochListeners(source.dataset, source.options.get("collate_fn"))
    if listeners:
        raise UserError(
            f"set_epoch of {listeners.names()} is never called in federated training, whose "
            "clients count no epochs together: remove it, and draw from torch's generators, which "
            "are seeded by the round, the client and the step"
        )
    return Samples(source.dataset, device, source.options.get("collate_fn"))


def evaluation(
    runner: Any,
    settings: TrainSettings,
    sources: dict[str, Source],
    world: World,
    reporter: Reporter,
) -> Evaluate | None:
    """What measures the global model on the loaders that are not trained on; None where there are
    none."""
    kept = {name: source for name, source in sources.items() if not source.trains}
    if not kept:
        return None
    feeds = build_feeds(kept, world, settings.seed, same_everywhere=settings.data.same_everywhere)
    model, precision = settings.model, Precision(settings.precision, world.device)
    forward = Forward(runner, model, world.device, settings.criterion, reporter.line)
    by_loader = metrics_by_loader(settings.metrics, sources)
    prepared = {
        name: (
            feed,
            loss_rule(settings.criterion, feed, runner),
            LoaderMetrics(
                by_loader[name],
                world,
                trains=False,
                output_key=metrics_take(runner, settings.criterion),
                say=reporter.line,
            ),
        )
        for name, feed in feeds.items()
    }

    limit = 3 if settings.check else None

    def evaluate(server: Server) -> dict[str, dict[str, float]]:
        server.layout.write(server.weights, model)
        server.layout.write_integers(server.integers, model)
        return {
            name: evaluate_feed(
                feed,
                islice(feed.epoch(0), limit),
                model,
                forward,
                rule,
                metrics,
                precision,
                reporter,
                name,
            )
            for name, (feed, rule, metrics) in prepared.items()
        }

    return evaluate
