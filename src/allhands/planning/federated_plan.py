"""What federated training would take: bytes of clients and rounds, the server's memory, and the
time of a round."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from allhands.data import build_feeds, tensors_in
from allhands.errors import UserError
from allhands.federated.algorithms import Server
from allhands.federated.algorithms.base import FIGURES
from allhands.federated.executors import ExecutorContext
from allhands.federated.federated_training import (
    divided,
    local_training,
    made_rounds,
    samples_of,
    trained_source,
)
from allhands.federated.rounds import Rounds
from allhands.federated.row_layout import RowLayout
from allhands.federated.strategy import Federated
from allhands.federated.systems import Systems
from allhands.loop.settings import Data
from allhands.planning.dry_step import Workload, dry_step
from allhands.planning.operation import Operation
from allhands.strategies import Single
from allhands.world import World

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RoundForecast:
    """What one round would take.

    Attributes:
        cohort: clients that are selected.
        arrived: those whose update comes in time.
        bytes_up, bytes_down: of all clients, as the history of a training has them.
        seconds: until the last update that is waited for; None where neither links nor devices are
            known.
    """

    cohort: int
    arrived: int
    bytes_up: float
    bytes_down: float
    seconds: float | None


@dataclass(frozen=True)
class FederatedPlan:
    """What federated training would take.

    Attributes:
        clients: how many.
        up, down: bytes that one client sends and gets in a round.
        rounds: one by one.
        server: bytes that the server holds, by kind: "model", "sums" of a cohort, and what the
            "algorithm" keeps.
        client: bytes that a client holds in a step, by kind, as `Prediction.memory` without
            libraries; and what it "keeps" from one of its rounds to the next.
        flops: floating point operations of a client for one sample, forward and backward.
    """

    clients: int
    up: float
    down: float
    rounds: list[RoundForecast]
    server: dict[str, int]
    client: dict[str, int]
    flops: float

    @property
    def seconds(self) -> float | None:
        """Of all rounds."""
        known = [one.seconds for one in self.rounds if one.seconds is not None]
        return math.fsum(known) if len(known) == len(self.rounds) else None

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain data: bytes and seconds."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        first, count = self.rounds[0], len(self.rounds)
        up = math.fsum(one.bytes_up for one in self.rounds)
        down = math.fsum(one.bytes_down for one in self.rounds)
        lines = [
            f"{self.clients:,} clients, {first.cohort} a round, {count} rounds",
            f"a client sends {_size(self.up)} and gets {_size(self.down)} a round; all rounds: "
            f"{_size(up)} up, {_size(down)} down",
            f"the server holds {_size(sum(self.server.values()))}: {_kinds(self.server)}",
            f"a client holds {_size(sum(self.client.values()))}: {_kinds(self.client)}",
            f"a client computes {_size(self.flops, 'FLOP')} a sample",
        ]
        if self.seconds is None:
            lines.append(
                "no time: say what links and devices do, with --download, --upload and "
                "--client-flops, or in the strategy's systems"
            )
        else:
            longest = max(one.seconds or 0.0 for one in self.rounds)
            lost = sum(one.cohort - one.arrived for one in self.rounds)
            lines.append(
                f"a round takes {self.seconds / count:,.3g} s, the longest {longest:,.3g} s, all "
                f"{self.seconds:,.4g} s" + (f"; {lost} updates do not come in time" if lost else "")
            )
        return "\n".join(lines)


def plan_federated(
    *,
    model: Any,
    criterion: Any,
    optimizer: Any,
    datasets: dict[str, Any],
    strategy: Federated,
    precision: str = "fp32",
    clip_norm: float | None = None,
    seed: int = 42,
    runner: Any = None,
    download: float | None = None,
    upload: float | None = None,
    flops: float | None = None,
) -> FederatedPlan:
    """Predict bytes, memory and times of federated training, without training.

    Cohorts are drawn, links and devices take their time, and who is late is left out by the code of
    a training; only the clients' steps are not taken.

    Args:
        model, criterion, optimizer, datasets, precision, clip_norm, seed: as for
            `SupervisedRunner.train`.
        strategy: clients, cohorts, algorithm, compression; its `systems` have devices and links.
        runner: as for `allhands.plan`.
        download, upload: bytes a second of each client's link, in place of those of `systems`.
        flops: floating point operations a second of each client's device, in place of the speed of
            `systems`.

    Raises:
        UserError: `Federated` cannot be honoured, or it has no rounds of cohorts.
    """
    if strategy.algorithm.name == "fedbuff":
        raise UserError(
            "algorithm='fedbuff' has no rounds of a cohort, so that its time is known from a run "
            "alone: allhands run, whose history has virtual_time"
        )
    if runner is None:
        from allhands.runner import SupervisedRunner

        runner = SupervisedRunner()
    strategy = copy.deepcopy(strategy)
    world = World(0, 0, 0, 1, 1, _CPU, "none", "plan")
    source = trained_source(Data(None, datasets).sources(seed))
    held = model
    if any(p.is_meta for p in model.parameters()):
        held = copy.deepcopy(model).to_empty(device=_CPU)
    settings = SimpleNamespace(
        criterion=criterion,
        optimizer=optimizer,
        model=model,
        check=False,
        clip_norm=clip_norm,
        precision=precision,
    )
    samples, clients, tests = divided(strategy, samples_of(source, _CPU), seed)
    local = local_training(settings, strategy, source, runner)
    clients, local, per_round = strategy.algorithm.prepare(
        clients, local, strategy.per_round or len(clients)
    )
    most = int(clients.sizes.max())
    feed = build_feeds({source.name: source}, world, seed)[source.name]
    size = min(local.batch_size or most, most)
    workload = Workload(
        model, criterion, optimizer, feed.example(size), size, runner, precision, 1, clip_norm
    )
    step = dry_step(workload, Single(), 1)
    computed = sum(one.flops for _, one in step.events if isinstance(one, Operation)) / size
    speed = None if flops is None else flops / max(1.0, computed)
    strategy.systems = _with(strategy.systems, download=download, upload=upload, speed=speed)
    server = Server.of(held, RowLayout(held, local.optimizer.groups), _CPU, len(clients), seed)
    work = ExecutorContext(held, local, strategy.algorithm, samples, clients, seed)
    nobody: Any = None  # trains
    rounds = made_rounds(
        strategy,
        work,
        server,
        nobody,
        world,
        per_round=per_round,
        rounds=strategy.rounds,
        tests=tests if tests is None or len(tests) == len(clients) else None,
    )
    kept = sum(rounds.states.lengths.values()) * server.weights.element_size()
    return FederatedPlan(
        len(clients),
        rounds.traffic.up,
        rounds.traffic.down,
        [_round(rounds, number) for number in range(strategy.rounds)],
        _server_memory(rounds, per_round),
        {**step.kinds, **({"keeps": kept} if kept else {})},
        computed,
    )


def _with(systems: Systems | None, **given: float | None) -> Systems | None:
    """The devices and links with what was given in place of theirs."""
    told: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not told:
        return systems
    new = Systems(**told)
    if systems is None:
        return new
    for name in told:
        setattr(systems, name, getattr(new, name))
    return systems


def _round(rounds: Rounds, number: int) -> RoundForecast:
    systems = rounds.systems
    before = 0.0 if systems is None else systems.now
    selected = rounds.select(number)
    arrived = rounds.arrive(selected, number)
    timed = systems is not None and any((systems.speed, systems.download, systems.upload))
    rounds.server.round += 1
    return RoundForecast(
        len(selected),
        len(arrived),
        rounds.traffic.up * len(arrived),
        rounds.traffic.down * len(selected),
        systems.now - before if systems is not None and timed else None,
    )


def _server_memory(rounds: Rounds, per_round: int) -> dict[str, int]:
    server, algorithm = rounds.server, rounds.algorithm
    lengths = rounds.summed()
    figures = per_round * len((*FIGURES, *algorithm.figures()))
    found = {
        "model": server.weights.nbytes + server.integers.nbytes,
        "sums": 8 * (sum(lengths.values()) + len(lengths) + figures),
        "algorithm": sum(tensor.nbytes for tensor in tensors_in(algorithm.state_dict())),
    }
    return {kind: size for kind, size in found.items() if size}


def _size(count: float, of: str = "B") -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:,.4g} {unit}{of}"
    return f"{count:,.0f} {of}"


def _kinds(kinds: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in kinds.items() if size)
