"""Small federated trainings for the tests: clients of unequal size, a model in float64, and the
loop written by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from allhands.federated.algorithms import FedAvg, Server
from allhands.federated.algorithms.base import Algorithm
from allhands.federated.clients import Clients
from allhands.federated.executors import ExecutorContext
from allhands.federated.federated_training import make_executor
from allhands.federated.local_training import LocalOptimizer, LocalTraining
from allhands.federated.rounds import Rounds
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.world import World, current_world, init

CPU = torch.device("cpu")
SIZES = (10, 25, 17, 3)


def data(
    samples: int = sum(SIZES), features: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """A regression: inputs ``[samples, features]``, targets ``[samples, 1]``."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=drawn, dtype=dtype)
    return x, (x @ torch.arange(1.0, features + 1, dtype=dtype)).sin()[:, None]


def model(features: int = 5, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small network with the same weights at every call."""
    drawn = torch.random.get_rng_state()
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
    torch.random.set_rng_state(drawn)
    return made


def clients(sizes: tuple[int, ...] = SIZES) -> Clients:
    """Clients with so many consecutive samples each."""
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return Clients([range(a, b) for a, b in itertools.pairwise(bounds)])


def rounds(
    algorithm: Algorithm | None = None,
    *,
    net: nn.Module | None = None,
    given: Any = None,
    who: Clients | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    criterion: Any = None,
    executor: Any = "serial",
    per_round: int | None = None,
    number: int = 3,
    seed: int = 42,
    kind: type[Rounds] = Rounds,
    world: World | None = None,
    device: torch.device = CPU,
    stages: dict[str, Any] | None = None,
    **local: Any,
) -> Rounds:
    """Rounds that are ready to run; `local` are options of `LocalTraining` (by default full
    batches, one epoch), `stages` those of `Rounds`."""
    net, who = (
        (net if net is not None else model()).to(device),
        who if who is not None else clients(),
    )
    given = given if given is not None else data()
    made = optimizer(net.parameters(), **(options or {"lr": 0.1}))
    local = {"batch_size": None, "epochs": 1, **local}
    training = LocalTraining(criterion or nn.MSELoss(), LocalOptimizer.like(made, net), **local)
    algorithm = algorithm or FedAvg()
    who, training, per_round = algorithm.prepare(who, training, per_round or len(who))
    layout = RowLayout(net, training.optimizer.groups)
    server = Server(layout, layout.read(net), layout.read_integers(net), device, len(who), seed)
    work = ExecutorContext(
        copy.deepcopy(net), training, algorithm, Samples(given, device), who, seed
    )
    world = world or current_world() or init(device="cpu")
    return kind(
        work,
        server,
        make_executor(executor, work, server),
        world,
        per_round=per_round,
        rounds=number,
        **(stages or {}),
    )


def loop(
    net: nn.Module,
    parts: list[torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor],
    number: int,
    lr: float,
) -> nn.Module:
    """FedAvg by hand: one full-batch step of SGD a client and round, averaged by samples, on plain
    state dicts."""
    net = copy.deepcopy(net)
    x, y = given
    for _ in range(number):
        learnt = []
        for part in parts:
            own = copy.deepcopy(net)
            nn.functional.mse_loss(own(x[part]), y[part]).backward()
            with torch.no_grad():
                learnt.append({name: p - lr * p.grad for name, p in own.named_parameters()})
        total = sum(len(part) for part in parts)
        mean = {
            name: sum(
                len(part) / total * one[name] for part, one in zip(parts, learnt, strict=True)
            )
            for name in learnt[0]
        }
        net.load_state_dict(mean)
    return net
