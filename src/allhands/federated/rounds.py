"""The rounds of a federated training, in five stages that a subclass may override."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allhands.data import derive_seed
from allhands.federated.algorithms.base import FIGURES, Algorithm, Server, Trained
from allhands.federated.executors.base import Executor, Job, Work
from allhands.federated.schedule import longest_first
from allhands.federated.states import ClientStates
from allhands.federated.sums import Sums
from allhands.world import World

#: Takes the row of the global model (in `Server`) to the values of each evaluated loader; called on every rank.
Evaluate = Callable[[Server], dict[str, dict[str, float]]]
History = dict[str, Any]


class Rounds:
    """Selects a cohort, has it trained on the devices of the world, and aggregates, round after round.

    Every rank runs the same loop and holds the same server; a rank trains its share of the cohort, and one all-reduce a round
    carries everything. Override a stage (`select`, `distribute`, `train`, `aggregate`, `evaluate`) to change it.

    Args:
        work: what is trained, and how.
        server: the global model.
        executor: trains clients on this rank's device.
        world: the ranks.
        per_round: clients of a cohort.
        rounds: how many in all.
        evaluate: measures the global model; None never does.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
    """

    def __init__(self, work: Work, server: Server, executor: Executor, world: World, *, per_round: int, rounds: int,
                 evaluate: Evaluate | None = None, evaluate_every: int = 1) -> None:  # fmt: skip
        self.work, self.server, self.executor, self.world = work, server, executor, world
        self.per_round, self.rounds = per_round, rounds
        self._evaluate, self.evaluate_every = evaluate, evaluate_every
        self.algorithm: Algorithm = work.algorithm
        self.clients = work.clients
        self.states = ClientStates(self.algorithm.client_state(server), server.layout.dtype, server.device, world)
        self.history: History = {"round": [], "seconds": [], "cohort": [], "train": {"loss": []}}

    # ------------------------------------------------------------------ the stages

    def select(self, round_: int) -> list[int]:
        """The cohort: clients drawn without repetition, a function of the seed and the round only."""
        drawn = random.Random(derive_seed(self.work.seed, "cohort", round_))
        return sorted(drawn.sample(range(len(self.clients)), self.per_round))

    def distribute(self, cohort: Sequence[int]) -> list[Job]:
        """The part of the cohort that this rank trains."""
        costs = [self.work.local.num_steps(self.clients.size(client)) for client in cohort]
        dealt = longest_first(costs, self.world.world_size)
        if self.states:
            self.states.move({cohort[slot]: rank for rank, slots in enumerate(dealt) for slot in slots})
        return [Job(cohort[slot], slot) for slot in dealt[self.world.rank]]

    def train(self, jobs: Sequence[Job], sums: Sums) -> None:
        """Train this rank's part of the cohort and add it to the sums."""

        def sink(trained: Trained, seconds: float) -> None:
            self.algorithm.contribute(trained, self.server, sums)
            if self.states:
                self.states.put(trained.clients, trained.own)
            sums.note(trained.slots, ok=1.0, samples=trained.samples, steps=trained.steps, loss=trained.loss,
                      seconds=seconds)  # fmt: skip

        self.executor.train(jobs, self.states.get, sink)

    def aggregate(self, sums: Sums) -> None:
        """Change the global model by the sums over the whole cohort."""
        self.algorithm.aggregate(self.server, sums)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The values of the global model, by loader."""
        return {} if self._evaluate is None else self._evaluate(self.server)

    # ------------------------------------------------------------------ the loop

    def run(self) -> History:
        """All rounds that are left; returns the history."""
        while self.server.round < self.rounds:
            self.one_round()
        return self.history

    def one_round(self) -> None:
        """One round: the five stages, and a line in the history."""
        began, round_ = time.perf_counter(), self.server.round
        cohort = self.select(round_)
        jobs = self.distribute(cohort)
        # Weights that come to about 1 over the cohort, see `Sums`.
        scale = 1.0 / max(1.0, float(sum(self.clients.size(client) for client in cohort)))
        sums = Sums(self.algorithm.vectors(self.server), len(cohort), (*FIGURES, *self.algorithm.figures()), scale,
                    self.server.device)  # fmt: skip
        self.train(jobs, sums)
        sums.exchange(self.world)
        figures = sums.figures()
        if float((figures["ok"] * figures["samples"]).sum()) > 0:
            self.aggregate(sums)
        self.server.round += 1
        values = self.evaluate() if self._due(round_) else {}
        self._note(round_, cohort, figures, values, time.perf_counter() - began)

    def _due(self, round_: int) -> bool:
        return (round_ + 1) % self.evaluate_every == 0 or round_ + 1 == self.rounds

    def _note(self, round_: int, cohort: list[int], figures: dict[str, torch.Tensor], values: dict[str, dict[str, float]],
              seconds: float) -> None:  # fmt: skip
        weights = figures["ok"] * figures["samples"]
        loss = float((figures["loss"] * weights).sum() / weights.sum()) if float(weights.sum()) else float("nan")
        self.history["round"].append(round_)
        self.history["seconds"].append(seconds)
        self.history["cohort"].append(cohort)
        self.history["train"]["loss"].append(loss)
        for loader, measured in values.items():
            known = self.history.setdefault(loader, {"round": []})
            known["round"].append(round_)
            for name, value in measured.items():
                known.setdefault(name, []).append(value)
