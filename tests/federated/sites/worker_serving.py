"""A server's side of a training across sites in this process, and the simulation of it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict

from allhands.federated.algorithms import Server, Trained
from allhands.federated.algorithms.base import FIGURES
from allhands.federated.row_layout import RowLayout
from allhands.federated.sites.arrays import pack, unpack
from allhands.federated.sites.definition import Definition
from allhands.federated.sites.site_worker import SiteWorker
from allhands.federated.strategy import Federated
from allhands.federated.sums import Sums
from allhands.runner import SupervisedRunner
from tests.federated.simulating import CPU

SIZES = (10, 26, 18, 3)  # no batch of 4 leaves a single sample over, which BatchNorm refuses
NAMES = ("north", "east", "south", "west")
SEED = 42


def data(sizes=SIZES):
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 6, generator=drawn)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def net(norm=False):
    torch.manual_seed(3)
    inner = [nn.BatchNorm1d(9)] if norm else []
    return nn.Sequential(nn.Linear(6, 9), *inner, nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3))


def define(rows=None, norm=False, model=None, optimizer=None, **options):
    model = model or net(norm)
    given = data() if rows is None else tuple(part[rows] for part in data())
    made = (
        optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    strategy = Federated(**{"local_epochs": 2, "rounds": 3, **options})
    datasets = {"batch_size": 4, "train": TensorDataset(*given)}
    return Definition(
        model,
        nn.CrossEntropyLoss(),
        made,
        datasets,
        strategy,
        SupervisedRunner(device="cpu"),
        seed=SEED,
    )


def rows_of(client):
    bounds = [0, *itertools.accumulate(SIZES)]
    return range(bounds[client], bounds[client + 1])


def simulate(tmp_path, norm=False, **options):
    definition = define(
        norm=norm, partition=[list(rows_of(client)) for client in range(len(SIZES))], **options
    )
    SupervisedRunner(device="cpu").train(
        model=definition.model,
        criterion=definition.criterion,
        optimizer=definition.optimizer,
        datasets=definition.datasets,
        distributed=definition.strategy,
        seed=SEED,
        verbose=False,
        workers=1,
    )
    return definition.model


class Serving:
    """The server's arithmetic, with nothing of a simulation's clients: a request to each site, and
    the replies in any order."""

    def __init__(self, tmp_path, norm=False, token=None, **options):
        self.definition = define(norm=norm, **options)
        strategy, model = self.definition.strategy, self.definition.model
        self.sites = [
            SiteWorker(define(rows_of(client), norm=norm, **options), name, tmp_path / name, token)
            for client, name in enumerate(NAMES)
        ]
        self.algorithm, local = strategy.algorithm, self.sites[0].local
        layout = RowLayout(model, local.optimizer.groups)
        self.server = Server(
            layout,
            layout.read(model),
            layout.read_integers(model),
            CPU,
            len(SIZES),
            SEED,
            local=local,
        )
        self.server.num_samples = sum(SIZES)
        self.server.own = self.sites[0].placed.rounds.server.own
        self.algorithm.begin(self.server)
        self.since = dict.fromkeys(range(len(SIZES)), -1)
        self.order = random.Random(7)

    def request(self, who, kind="train", **changed):
        server = self.server
        config = {
            "kind": kind,
            "run": "trial",
            "round": server.round,
            "client": who,
            "clients": len(SIZES),
            "seed": SEED,
            "lr": 0.1,
            "cohort": len(SIZES),
            "since": self.since[who],
            **changed,
        }
        model = {"row": server.weights, **self.algorithm.beside(server)}
        if server.layout.integers:
            model["integers"] = server.integers
        content = {name: value for name, value in config.items() if value is not None}
        return RecordDict({"allhands": ConfigRecord(content), "model": pack(model)})

    def expected(self):
        server = self.server
        integers = (
            {"integers": (torch.int64, tuple(server.integers.shape))}
            if server.layout.integers
            else {}
        )
        return {"update": (server.layout.dtype, (server.layout.length,)), **integers}

    def round(self, absent=(), dropped=()):
        server, algorithm = self.server, self.algorithm
        cohort = [client for client in range(len(SIZES)) if client not in absent]
        taken = [client for client in cohort if client not in dropped]
        scale = 1.0 / sum(SIZES[client] for client in cohort)
        lengths = algorithm.vectors(server)
        if server.layout.integers:
            lengths["integers"] = len(server.integers)
        sums = Sums(lengths, len(cohort), (*FIGURES, *algorithm.figures()), scale, CPU)
        replies = [
            (slot, client, self.sites[client].handle(self.request(client)))
            for slot, client in enumerate(cohort)
        ]
        self.order.shuffle(replies)
        for slot, client, reply in replies:
            assert reply["allhands"]["status"] == "ok", reply["allhands"]
            if client not in taken:
                continue
            update, figures = unpack(reply["update"], self.expected()), reply["figures"]
            row = update["update"][None]
            trained = Trained(
                [client],
                [slot],
                row,
                server.weights,
                *(
                    torch.tensor([figures[name]], dtype=torch.float64)
                    for name in ("samples", "steps", "loss")
                ),
                received=row,
            )
            trained.own = {
                name: torch.zeros(1, length)
                for name, length in algorithm.client_state(server).items()
            }
            if server.layout.integers:
                sums.add("integers", update["integers"][None] - server.integers, trained.samples)
            algorithm.contribute(trained, server, sums)
            sums.note(
                [slot], ok=1.0, samples=trained.samples, steps=trained.steps, loss=trained.loss
            )
        for client in taken:
            self.since[client] = server.round
        algorithm.aggregate(server, sums)
        if server.layout.integers:
            server.integers += sums.mean("integers").round().to(server.integers)
        server.round += 1

    def model(self):
        model = self.definition.model
        self.server.layout.write(self.server.weights, model)
        self.server.layout.write_integers(self.server.integers, model)
        return model


def assert_same(one, other):
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def row_of(serving):
    return serving.server.weights.clone()
