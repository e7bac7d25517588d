"""The rounds of a federated training, in five stages that a subclass may override."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allhands.checks import check_choice
from allhands.comm import calls
from allhands.data import derive_seed
from allhands.errors import AllhandsError, UserError
from allhands.federated import by_client
from allhands.federated.algorithms.base import (
    FIGURES,
    OWN_LAYERS,
    START_GRADIENT,
    Algorithm,
    Server,
    Trained,
)
from allhands.federated.client_schedule import Costs, Queue, deal, longest_first
from allhands.federated.client_states import ClientStates
from allhands.federated.clients import Clients
from allhands.federated.executors.base import CohortMember, Executor, ExecutorContext
from allhands.federated.failures import Failures
from allhands.federated.personal import evaluate_clients, keep_own, means, own_layers
from allhands.federated.privacy import Privacy
from allhands.federated.sums import Sums
from allhands.federated.systems import NOTED, Systems
from allhands.federated.team import Team
from allhands.federated.update_compression import RESIDUAL, Traffic, UpdateCompression
from allhands.report.history import History
from allhands.world import World

#: Takes the row of the global model (in `Server`) to the values of each evaluated loader; called on
#: every rank.
Evaluate = Callable[[Server], dict[str, dict[str, float]]]
_INTEGERS = "integers"  # the name of their sum


class BadUpdateError(AllhandsError, RuntimeError):
    """A client's model came out of its training with NaN or Inf."""


class Rounds:
    """Selects a cohort, has it trained on the devices of the world, and aggregates, round after
    round.

    Every rank runs the same loop and holds the same server; a rank trains its share of the cohort,
    and one all-reduce a round carries everything. Override a stage (`select`, `distribute`,
    `train`, `aggregate`, `evaluate`) to change it.

    Args:
        work: what is trained, and how.
        server: the global model.
        executor: trains clients on this rank's device.
        world: the ranks.
        per_round: clients of a cohort.
        rounds: how many in all.
        evaluate: measures the global model; None never does.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
        local_layers: names of modules, parameters or buffers that each client keeps as its own
            (``head.*``), beside those that the algorithm keeps.
        on_bad_update: what happens when a client's model comes out with NaN or Inf: "stop" ends the
            run, "skip" leaves the client out of the round; both name it.
        on_client_failure: what happens when a client's training raises: "stop" ends the run on all
            ranks, "retry" trains it again, "skip" leaves it out of the round; all name it with its
            traceback.
        client_retries: how often "retry" tries again before it stops.
        tests: test samples of every client, on which its own model is measured whenever the global
            one is; the mean over all of them is in the history as "clients".
        compression: narrows what clients send; None: they send all.
        privacy: bounds and hides what a client contributes.
        systems: devices in virtual time, which decide who takes part and how long a round takes.
        team: ranks that train a client together, for an executor that does so; None: each rank
            trains clients of its own.

    Raises:
        UserError: the algorithm cannot train this model or cohort, or a name in `local_layers` is
            none of the model's.
    """

    def __init__(
        self,
        work: ExecutorContext,
        server: Server,
        executor: Executor,
        world: World,
        *,
        per_round: int,
        rounds: int,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 1,
        local_layers: Sequence[str] = (),
        on_bad_update: str = "stop",
        on_client_failure: str = "stop",
        client_retries: int = 2,
        tests: Clients | None = None,
        compression: UpdateCompression | None = None,
        privacy: Privacy | None = None,
        systems: Systems | None = None,
        team: Team | None = None,
    ) -> None:
        self.work, self.server, self.executor, self.world = work, server, executor, world
        self.per_round, self.rounds = per_round, rounds
        self._evaluate, self.evaluate_every = evaluate, evaluate_every
        self.algorithm: Algorithm = work.algorithm
        self.clients = work.clients
        check_choice("on_bad_update", on_bad_update, ("stop", "skip"))
        count = len(work.clients)
        if per_round > count:
            raise UserError(f"per_round={per_round} of {count} clients; write at most {count}")
        if tests is not None and (len(tests) != count or len(tests.indices) == 0):
            raise UserError(
                f"tests={len(tests.indices)} samples of {len(tests)} clients, and {count} clients "
                "are trained; give each of them a test split, and at least one a sample"
            )
        self.on_bad_update, self.tests = on_bad_update, tests
        self.team = team if team is not None else Team.of(world, 1)
        self.failures = Failures(world, on_client_failure, client_retries, self.team)
        self.costs, self.queue = Costs(), Queue(world)
        server.local, server.world = work.local, world
        server.num_samples = len(work.clients.indices)
        server.own = own_layers(
            [*self.algorithm.keeps(work.model), *local_layers], work.model, server, self.algorithm
        )
        self.algorithm.check(server, per_round)
        self.algorithm.begin(server)
        self.privacy = privacy
        if privacy is not None:
            if compression is not None:
                raise UserError(
                    "compress= with privacy=: what is narrowed after it was clipped may exceed the "
                    "bound; leave one of them out"
                )
            privacy.check(self.algorithm, server, per_round)
        self.traffic = Traffic(self.algorithm, server, compression)
        self.systems = systems
        if systems is not None:
            if privacy is not None and systems.selects:
                raise UserError(
                    "privacy= with systems= that decide who takes part: epsilon holds for cohorts "
                    "drawn from all "
                    "clients alike; leave out availability, dropout, deadline and over_selection"
                )
            systems.begin(work.clients, work.local, self.traffic, work.seed, per_round)
        lengths = self.algorithm.client_state(server)
        if server.own is not None:
            lengths = {**lengths, OWN_LAYERS: len(server.own) + 1}
        if compression is not None and compression.feedback:
            lengths = {**lengths, RESIDUAL: server.layout.length}
        #: The clients that brought an update in the last round, and these figures of each.
        self.last: dict[str, list[float]] = {}
        self.states = ClientStates(lengths, server.layout.dtype, server.device, world)
        noted = [
            *("round", "seconds", "cohort", "skipped", "failed", "retried", "unchanged"),
            *("bytes_up", "bytes_down"),
            *(["epsilon"] if privacy is not None else []),
            *(NOTED if systems is not None else []),
        ]
        self.history = History({"train": {"loss": []}, **{name: [] for name in noted}})
        by_client.begin(self.history, self.clients)

    def bind(self, evaluate: Evaluate | None) -> None:
        """Go on with the ranks that there are now, which all call it together; `evaluate` is made
        for them."""
        self.team = Team.of(self.world, 1)
        failures = self.failures
        self.failures = Failures(self.world, failures.action, failures.retries, self.team)
        self.queue, self._evaluate = Queue(self.world), evaluate

    # ------------------------------------------------------------------ the stages

    def select(self, round_: int) -> list[int]:
        """The cohort: clients drawn without repetition, a function of the seed and the round
        only."""
        if self.privacy is not None and self.privacy.sampling == "poisson":
            return self.privacy.select(self.server, self.per_round, round_)
        if self.systems is not None and self.systems.draws:
            return self.systems.select(self.per_round, round_)
        drawn = random.Random(derive_seed(self.work.seed, "cohort", round_))
        return sorted(drawn.sample(range(len(self.clients)), self.per_round))

    def arrive(self, selected: list[int], round_: int) -> list[int]:
        """Those of a cohort whose updates will come in time, in virtual time; the others are not
        trained."""
        return (
            selected if self.systems is None else self.systems.run(selected, round_, self.per_round)
        )

    def distribute(self, cohort: Sequence[int]) -> list[CohortMember]:
        """The part of the cohort that this rank trains; what is in no rank's part lies in
        `queue`."""
        steps = [self.work.local.num_steps(self.clients.size(client)) for client in cohort]
        costs, devices = self.costs.predict(cohort, steps), self.team.teams
        # Clients' own vectors move in advance; clients that are trained together gain less from
        # evenness than they lose by being few; and before any time is known, nobody can tell what a
        # pull is worth.
        self.queue.begin(self.server.round, [])
        alone = self.team.size == 1
        if (
            self.states
            or self.executor.together
            or not self.queue
            or not alone
            or self.costs.each is None
        ):
            dealt = longest_first(costs, devices)
        else:
            dealt, groups = deal(costs, devices)
            self.queue.begin(
                self.server.round,
                [[CohortMember(cohort[slot], slot) for slot in group] for group in groups],
            )
        if self.states:
            leader = self.team.leader
            self.states.move(
                {cohort[slot]: leader(team) for team, slots in enumerate(dealt) for slot in slots}
            )
        return [CohortMember(cohort[slot], slot) for slot in dealt[self.team.number]]

    def train(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        """Train this rank's part of the cohort and add it to the sums."""

        def states(clients: Sequence[int]) -> dict[str, torch.Tensor]:
            return self.team.share(self.states.get(clients))

        def sink(trained: Trained, seconds: float) -> None:
            if not self.team.leads:
                return
            # NaN or Inf where one number is; a sum in the rows' own format takes a tenth of the
            # time, and is too large for it only where numbers are as large.
            sums_of_rows = trained.rows.sum(1).double()
            if not bool(torch.isfinite(sums_of_rows).all()):
                sums_of_rows = trained.rows.sum(1, dtype=torch.float64)
            if trained.start_loss is not None:
                sums_of_rows += trained.start_loss
            if START_GRADIENT in trained.own:
                sums_of_rows += trained.own[START_GRADIENT].sum(1, dtype=torch.float64)
            finite = torch.isfinite(sums_of_rows).tolist()
            if not all(finite):
                sums.note(
                    [slot for slot, good in zip(trained.slots, finite, strict=True) if not good],
                    bad=1.0,
                )
                trained = trained.only([row for row, good in enumerate(finite) if good])
                if not trained.clients:
                    return
            keep_own(trained, self.server)
            if trained.integers is not None and self.algorithm.shares:
                sums.add(_INTEGERS, trained.integers - self.server.integers, trained.samples)
            if self.privacy is not None:
                self.privacy.bound(trained)
            self.traffic.narrow(trained, self.server)
            self.algorithm.contribute(trained, self.server, sums)
            if self.states:
                self.states.put(trained.clients, trained.own)
            sums.note(
                trained.slots,
                ok=1.0,
                samples=trained.samples,
                steps=trained.steps,
                loss=trained.loss,
                seconds=seconds,
                rank=self.world.rank,
            )

        self.failures.train(self.executor, jobs, states, sink, self.clients.name)

    def aggregate(self, sums: Sums) -> None:
        """Change the global model by the sums over the whole cohort."""
        if self.privacy is not None:
            self.privacy.release(self.server, sums, self.per_round)
        self.algorithm.aggregate(self.server, sums)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The values of the global model, by loader, and of clients' own models on their
        `tests`."""
        values = {} if self._evaluate is None else self._evaluate(self.server)
        if self.tests is not None:
            totals = evaluate_clients(self.work, self.server, self.states, self.tests, self.world)
            values["clients"] = means(totals.sum(0).tolist())
            each = [(client, means(row)) for client, row in enumerate(totals.tolist()) if row[0]]
            by_client.note_measured(self.history, self.clients, self.server.round - 1, each)
        return values

    # ------------------------------------------------------------------ the loop

    def run(self) -> History:
        """All rounds that are left; returns the history."""
        while self.server.round < self.rounds:
            self.one_round()
        return self.history

    def state_dict(self) -> dict[str, Any]:
        """What all ranks hold alike beside the model, for a checkpoint between two rounds."""
        return {
            "round": self.server.round,
            "history": dict(self.history),
            "costs": self.costs.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.server.round, self.history = state["round"], History(state["history"])
        by_client.begin(self.history, self.clients)
        self.costs.load_state_dict(state["costs"])
        if self.systems is not None and self.history["virtual_time"]:
            self.systems.now = self.history["virtual_time"][-1]
        self.algorithm.load_state_dict(state["algorithm"])

    def one_round(self) -> dict[str, dict[str, float]]:
        """One round: the five stages, and a line in the history. Returns what `evaluate` gave, when
        it was due."""
        began, round_ = time.perf_counter(), self.server.round
        self.server.learning_rate = float(self.work.local.optimizer.options[0].get("lr", 0.0))
        selected = self.select(round_)
        cohort = self.arrive(selected, round_)
        jobs = self.distribute(cohort)
        # Weights that come to about 1 over the cohort, see `Sums`.
        scale = 1.0 / max(1.0, float(sum(self.clients.size(client) for client in cohort)))
        lengths = self.summed()
        named = (*FIGURES, *self.algorithm.figures())
        sums = Sums(lengths, max(1, len(cohort)), named, scale, self.server.device)
        self._train_all(jobs, sums)
        calls.note(("round", round_ + 1))
        sums.exchange(self.world)
        figures = sums.figures()
        self.failures.settle(figures, cohort, self.clients, round_)
        # Of an empty cohort, none.
        figures = {name: column[: len(cohort)] for name, column in figures.items()}
        self.costs.learn(
            cohort, *((figures[name] * figures["ok"]).tolist() for name in ("steps", "seconds"))
        )
        kept = figures["ok"].nonzero().flatten().tolist()
        self.last = {
            "client": [cohort[slot] for slot in kept],
            **{
                name: figures[name][kept].tolist()
                for name in ("rank", "samples", "steps", "loss", "seconds")
            },
        }
        skipped = [cohort[slot] for slot in figures["bad"].nonzero().flatten().tolist()]
        if skipped:
            self._say_bad(round_, skipped)
        # Noise comes also when nobody does: that nobody came is not to be seen.
        unchanged = self.privacy is None and float((figures["ok"] * figures["samples"]).sum()) <= 0
        if not unchanged:
            self.aggregate(sums)
            # The mean of what clients have counted, to the nearest whole number.
            if _INTEGERS in lengths:
                self.server.integers += sums.mean(_INTEGERS).round().to(self.server.integers)
        elif self.world.rank == 0:
            print(
                f"round {round_}: no client of {len(cohort)} has brought an update; the model "
                "stays as it was",
                flush=True,
            )
        self.history["skipped"].append(self.clients.called(skipped))
        for name in ("failed", "retried"):
            slots = figures[name].nonzero().flatten().tolist()
            self.history[name].append(self.clients.called([cohort[slot] for slot in slots]))
        self.history["unchanged"].append(unchanged)
        self.server.round += 1
        values = self.evaluate() if self.due(round_) else {}
        self._note(round_, selected, figures, values, time.perf_counter() - began)
        return values

    def summed(self) -> dict[str, int]:
        """The vectors that are summed over a cohort: name to length."""
        lengths, server = self.algorithm.vectors(self.server), self.server
        shared = server.layout.integers and self.algorithm.shares
        return {**lengths, _INTEGERS: len(server.integers)} if shared else lengths

    def _train_all(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        """Train this rank's part, and then what is left in the queue. Whatever fails, the rank goes
        on to the round's sum, where the others wait for it."""
        self.failures.begin()
        part: Sequence[CohortMember] | None = jobs
        try:
            while part is not None and not self.failures.fatal:
                jobs = part
                self.train(jobs, sums)
                part = self.queue.pull()
        except Exception as error:
            self.failures.broke(error, jobs)
        self.failures.note(sums)

    def _say_bad(self, round_: int, clients: Sequence[int]) -> None:
        names = ", ".join(self.clients.name(client) for client in clients[:10]) + (
            ", …" if len(clients) > 10 else ""
        )
        what = (
            f"round {round_}: the model of client{'s' if len(clients) > 1 else ''} {names} came "
            "out with NaN or Inf"
        )
        if self.on_bad_update == "stop":
            raise BadUpdateError(
                f"{what}; lower the clients' learning rate or set clip_norm, or set "
                "on_bad_update='skip' to leave such clients out of the round"
            )
        if self.world.rank == 0:
            print(f"{what}, left out", flush=True)

    def due(self, round_: int) -> bool:
        """Whether the model is measured after this round."""
        return (round_ + 1) % self.evaluate_every == 0 or round_ + 1 == self.rounds

    def _note(
        self,
        round_: int,
        cohort: list[int],
        figures: dict[str, torch.Tensor],
        values: dict[str, dict[str, float]],
        seconds: float,
    ) -> None:
        weights = figures["ok"] * figures["samples"]
        if float(weights.sum()):
            loss = float((figures["loss"] * weights).sum() / weights.sum())
        else:
            loss = float("nan")
        self.history["round"].append(round_)
        self.history["seconds"].append(seconds)
        self.history["cohort"].append(self.clients.called(cohort))
        by_client.note_updates(self.history, self.clients, round_, self.last)
        self.history["train"]["loss"].append(loss)
        self.history["bytes_up"].append(
            self.traffic.up * float((figures["ok"] + figures["bad"]).sum())
        )
        self.history["bytes_down"].append(self.traffic.down * len(cohort))
        if self.privacy is not None:
            self.history["epsilon"].append(self.privacy.epsilon(round_ + 1))
        if self.systems is not None:
            self.systems.note(self.history, self.clients)
        for loader, measured in values.items():
            self._note_values(round_, loader, measured)

    def _note_values(self, round_: int, loader: str, measured: dict[str, float]) -> None:
        known = self.history.setdefault(loader, {"round": []})
        known["round"].append(round_)
        for name, value in measured.items():
            known.setdefault(name, []).append(value)
