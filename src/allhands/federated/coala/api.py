"""COALA's functions: one federation in each process, made by `init` and trained by `run`."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import allhands.world as worlds
from allhands.comm import broadcast_tensors
from allhands.data import derive_seed, preserved_generators, seed_everything
from allhands.errors import UserError, WorldError, kind_of
from allhands.federated.algorithms import FedAvg, Server
from allhands.federated.coala import models
from allhands.federated.coala.client import BaseClient, check_client, trains_itself
from allhands.federated.coala.config import Config, check
from allhands.federated.coala.datasets import FederatedDataset, as_federated, split
from allhands.federated.coala.named_datasets import load
from allhands.federated.coala.pool import Objects, Pool
from allhands.federated.coala.server import BaseServer, check_server, overridden
from allhands.federated.coala.server_rounds import ServerRounds, Uploads
from allhands.federated.executors import Executor, ExecutorContext
from allhands.federated.federated_training import make_executor
from allhands.federated.local_training import LocalOptimizer, LocalTraining
from allhands.federated.row_layout import RowLayout
from allhands.loop.joining import ends_with_a_worker, in_elastic_job
from allhands.world import World

_NOT_ELASTIC = (
    "COALA's server and clients are objects in each process, which may keep a state of their own; "
    "write SupervisedRunner().train(distributed=Federated(…)), whose rounds go on"
)


@dataclass
class Result:
    """What `run` returns.

    Attributes:
        history: by round: the cohort, seconds, the clients' training loss, and under ``test`` the
            tests.
        model: the global model after the last round, on the processor; the same in every process.
    """

    history: dict[str, Any]
    model: nn.Module


@dataclass
class _Registered:
    train: FederatedDataset | None = None
    test: FederatedDataset | None = None
    val: FederatedDataset | None = None
    model: type[nn.Module] | nn.Module | None = None
    server: type[BaseServer] = BaseServer
    client: type[BaseClient] = BaseClient


@dataclass
class _Federation:
    conf: Config
    world: World
    train: FederatedDataset | None = None
    test: FederatedDataset | None = None
    classes: int = 0
    model: nn.Module | None = None
    built: tuple[BaseServer, ServerRounds, Pool] | None = None
    ran: bool = field(default=False)


_registered = _Registered()
_federation: _Federation | None = None
_joined: tuple[Any, ...] | None = None


# ---------------------------------------------------------------------- what is registered


def register_dataset(train_data: Any, test_data: Any, val_data: Any = None) -> None:
    """Train on other data than the configuration's; before `init`.

    Args:
        train_data: a `FederatedTensorDataset` or `FederatedTorchDataset`; or any data set with
            indices and a length, such as a `TensorDataset`, which is then divided as the
            configuration says.
        test_data: likewise; divided only if it comes divided. None: nothing is tested.
        val_data: handed to the registered server as `val_data`.

    Raises:
        UserError: something else was passed.
    """
    if isinstance(train_data, Mapping) and {"s_train_data", "u_train_data"} & train_data.keys():
        raise UserError(
            "register_dataset: semi-supervised training (s_train_data, u_train_data) is not here; "
            "pass labelled data"
        )
    _before_init("register_dataset")
    _registered.train = as_federated(train_data, "train_data")
    _registered.test = None if test_data is None else as_federated(test_data, "test_data")
    _registered.val = None if val_data is None else as_federated(val_data, "val_data")


def register_model(model: type[nn.Module] | nn.Module) -> None:
    """Train another model than the configuration's; before `init`.

    Args:
        model: a class that needs no arguments, whose weights are then a function of the seed; or a
            model, of which a copy is trained, with the weights of the first process.

    Raises:
        UserError: something else was passed.
    """
    _before_init("register_model")
    if not isinstance(model, nn.Module) and not (
        isinstance(model, type) and issubclass(model, nn.Module)
    ):
        shown = f"the class {model.__name__}" if isinstance(model, type) else kind_of(model)
        raise UserError(
            f"register_model: {shown} is no model; pass a class derived from torch.nn.Module, or "
            "an object of one"
        )
    _registered.model = model


def register_server(server: type[BaseServer]) -> None:
    """Use a class derived from `BaseServer`; before `init`. Raises `UserError` for anything else,
    and for methods that nothing would call."""
    _before_init("register_server")
    _registered.server = check_server(server)


def register_client(client: type[BaseClient]) -> None:
    """Use a class derived from `BaseClient`; before `init`. Raises `UserError` for anything else,
    and for methods that nothing would call."""
    _before_init("register_client")
    _registered.client = check_client(client)


def unregister() -> None:
    """Forget everything that was registered, and the federation."""
    global _registered, _federation
    _registered, _federation = _Registered(), None


def _before_init(function: str) -> None:
    if _federation is not None and not _federation.ran and _federation.built is not None:
        raise UserError(
            f"{function} was called after init, which has built everything; call it before init, "
            "or init(…, init_all=False)"
        )


# ---------------------------------------------------------------------- one federation


def init(conf: Mapping[str, Any] | Config | None = None, init_all: bool = True) -> None:
    """Check the configuration, join the other processes, and make the data, the model, the server
    and the clients.

    A second call begins afresh, with what is registered. Nothing is drawn from global generators.

    Args:
        conf: keys and values, nested as in COALA's file; what is left out has its default.
        init_all: False: leave the making of everything to `init_dataset`, `init_model` and `run`.

    Raises:
        UserError: a key or value is wrong; the data set, the model or the split cannot be made.
        WorldError: the processes did not meet, or `gpu` is not their number.
    """
    global _federation
    conf = check(conf)
    if _registered.model is None:
        models.known(conf.model)
    conf.client.optimizer.options()
    _federation = None
    _federation = _Federation(conf, _join(conf))
    if init_all:
        _build(_federation)


def init_dataset() -> None:
    """Make the data set after ``init(…, init_all=False)``; what is registered is taken as it is."""
    _data(_now("init_dataset"))


def init_model() -> nn.Module:
    """Make the model after ``init(…, init_all=False)``, and return it."""
    federation = _now("init_model")
    return _model(federation)


def run() -> Result:
    """Train all rounds; call it in every process.

    Returns:
        The history and the trained model, the same in every process.

    Raises:
        UserError: `init` was not called, or the training cannot be done as configured.
        ClientFailedError: a client's training raised; it is named with its traceback.
    """
    federation = _now("run")
    if federation.ran:
        raise UserError("run was called twice; call init again for another training")
    server, rounds, pool = _build(federation)
    rounds.say(_describe(federation, rounds))
    if in_elastic_job():
        rounds.say(ends_with_a_worker(_NOT_ELASTIC))
    server.start(rounds.model(), pool)
    result = Result(rounds.history, rounds.model().cpu())
    # What was trained is let go now, with its share of the world's store, which must not outlive
    # the world: a server and its rounds name each other, and the end of the program would be too
    # late to find that out.
    federation.ran, federation.built, federation.train = True, None, None
    federation.test, federation.model = None, None
    del server, rounds, pool
    gc.collect()
    return result


def _now(function: str) -> _Federation:
    if _federation is None:
        raise UserError(f"{function} was called before init; call init(config) first")
    return _federation


def _describe(federation: _Federation, rounds: ServerRounds) -> str:
    conf, world = federation.conf, federation.world
    processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    with_name = f"{conf.task_id}: " if conf.task_id else ""
    return (
        f"{with_name}{len(rounds.clients)} clients, {conf.server.clients_per_round} a round, "
        f"{conf.server.rounds} rounds, {processes} on {world.device.type}"
    )


# ---------------------------------------------------------------------- the processes


def _join(conf: Config) -> World:
    """The world that the configuration describes; one that an earlier `init` joined is kept if it
    is the same."""
    global _joined
    given, number = conf.distributed, max(1, conf.gpu)
    told: dict[str, Any] = {"device": "cpu"} if conf.gpu == 0 else {}
    if given.backend != "auto" and number > 1:
        told["backend"] = given.backend
        if given.backend != "nccl" and torch.cuda.is_available():
            told["device"] = "cuda"
    if number > 1 and given.world_size:
        if not given.init_method:
            raise UserError(
                f"gpu = {conf.gpu}, and distributed.init_method is not set; write "
                "'tcp://127.0.0.1:PORT' with a port that is free, the same in every process"
            )
        told |= {
            "rank": given.rank,
            "local_rank": given.local_rank,
            "world_size": number,
            "init_method": given.init_method,
        }
    key = tuple(sorted(told.items()))
    if _joined is not None and _joined != key:
        worlds.finalize()
    _joined = None
    world = worlds.init(**told)
    if world.world_size != number:
        size, by = world.world_size, world.environment
        worlds.finalize()
        if size == 1:
            raise WorldError(
                f"gpu = {conf.gpu}, and nothing says which of the {number} processes this is: set "
                "distributed.rank, local_rank, world_size and init_method, or start the script "
                f"with `allhands launch -n {number}`, torchrun or srun"
            )
        raise WorldError(
            f"gpu = {conf.gpu}, and there are {size} processes ({by}); set gpu to {size}"
        )
    _joined = key
    return world


# ---------------------------------------------------------------------- what is trained


def _data(federation: _Federation) -> FederatedDataset:
    if federation.train is None:
        conf, seed = federation.conf, derive_seed(federation.conf.seed, "data")
        if _registered.train is not None:
            train, test = copy.copy(_registered.train), copy.copy(_registered.test)
            split(train, conf.data, seed)
            if test is not None:
                test.divide(seed)
            targets = train.samples.targets()
            whole = (
                targets is not None
                and targets.dim() == 1
                and not targets.is_floating_point()
                and len(targets)
            )
            federation.classes = int(targets.max()) + 1 if whole else 0  # type: ignore[union-attr]
        else:
            train, test, federation.classes = load(conf.data, seed)
        assert train.clients is not None
        empty = [
            name for name, size in zip(train.users, train.clients.sizes, strict=True) if not size
        ]
        if empty:
            raise UserError(
                f"{len(empty)} of {len(train.users)} clients have no sample, such as {empty[0]!r}; "
                "leave them out"
            )
        if conf.server.clients_per_round > len(train.clients):
            raise UserError(
                f"server.clients_per_round = {conf.server.clients_per_round}, and there are "
                f"{len(train.clients)} clients; write at most {len(train.clients)}"
            )
        for part in (train, test):
            if part is not None:
                part.to(federation.world.device)
        federation.train, federation.test = train, test
    return federation.train


def _model(federation: _Federation) -> nn.Module:
    if federation.model is None:
        train, given = _data(federation), _registered.model
        with preserved_generators():
            seed_everything(derive_seed(federation.conf.seed, "model"))
            if given is None:
                sample = train.samples.take(torch.zeros(1, dtype=torch.int64))[0][0]
                if not federation.classes:
                    raise UserError(
                        "the registered data set does not show whole numbers as targets, from "
                        "which a model's number of classes would follow; call "
                        "register_model(YourModel)"
                    )
                made = models.build(federation.conf.model, sample, federation.classes)
            else:
                made = given() if isinstance(given, type) else copy.deepcopy(given)
        made.to(federation.world.device)
        broadcast_tensors([*made.parameters(), *made.buffers()], federation.world)
        federation.model = made
    return federation.model


def _build(federation: _Federation) -> tuple[BaseServer, ServerRounds, Pool]:
    if federation.built is not None:
        return federation.built
    conf, world, train = federation.conf, federation.world, _data(federation)
    model = _model(federation)
    assert train.clients is not None
    with preserved_generators():
        seed_everything(derive_seed(conf.seed, "server"))
        pool = Pool(_registered.client, conf.client, train, federation.test, world.device)
        in_server = federation.test if conf.test_mode == "test_in_server" else None
        coala = _registered.server(
            conf,
            test_data=in_server,
            val_data=_registered.val,
            is_remote=False,
            local_port=conf.local_port,
        )
    if federation.test is None and not (
        overridden(coala, "test") or overridden(coala, conf.test_mode)
    ):
        raise UserError(
            "there is no test set, and every round would be tested; pass one: "
            "register_dataset(train, test)"
        )
    optimizer = LocalOptimizer.of(
        conf.client.optimizer.type, model, **conf.client.optimizer.options()
    )
    layout = RowLayout(model, optimizer.groups)
    if conf.server.aggregation_content == "parameters" and (layout.buffers or layout.integers):
        raise UserError(
            "server.aggregation_content = 'parameters': the model has buffers, such as "
            f"'{(*(place.name for place in layout.buffers), *layout.integers)[0]}', and COALA "
            "keeps those of whichever client came first; write 'all', or use GroupNorm"
        )
    algorithm = (
        Uploads()
        if overridden(coala, "aggregate")
        else FedAvg(weighted=conf.server.aggregation_strategy == "FedAvg")
    )
    algorithm.average_buffers = True
    # The order of samples follows client.seed too; the split, the cohorts and the weights do not.
    seed = derive_seed(conf.seed, "clients", conf.client.seed)
    server = Server.of(model, layout, world.device, len(train.clients), seed)
    objects = trains_itself(_registered.client)
    local = LocalTraining(
        pool[0].load_loss_fn(conf.client),
        optimizer,
        batch_size=conf.client.batch_size,
        epochs=conf.client.local_epoch,
    )
    work = ExecutorContext(
        copy.deepcopy(model), local, algorithm, train.samples, train.clients, seed
    )
    executor: Executor
    if objects:
        if conf.executor != "auto":
            raise UserError(
                f"executor = {conf.executor!r} trains all clients alike, and "
                f"{_registered.client.__name__} has a training of its own; leave executor out"
            )
        executor = Objects(work, server, pool)
    else:
        executor = make_executor(conf.executor, work, server)
    rounds = ServerRounds(work, server, executor, world, conf, coala, pool, model)
    federation.built = coala, rounds, pool
    return federation.built
