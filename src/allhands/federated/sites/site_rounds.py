"""Rounds whose clients are sites: the arithmetic of the simulation, on what arrives."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated import by_client
from allhands.federated.algorithms.base import Trained
from allhands.federated.client_states import ClientStates
from allhands.federated.clients import Clients
from allhands.federated.executors.base import CohortMember
from allhands.federated.rounds import _INTEGERS, BadUpdateError, Rounds
from allhands.federated.sites.executor import SiteExecutor
from allhands.federated.sums import Sums


class SiteClients(Clients):
    """Clients of whose samples only the numbers are known, and those not before a site is there."""

    def __init__(self, names: Sequence[str]) -> None:
        self._set_sizes(np.zeros(len(names), dtype=np.int64))
        self._set_names(names)

    def _set_sizes(self, sizes: np.ndarray) -> None:
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        # As many as there are samples, and nobody here can say which.
        self.indices = torch.full((1,), -1).expand(int(self.offsets[-1]))

    def set_size(self, client: int, samples: int) -> None:
        """A site has said how many samples it trains on."""
        if self.size(client) != samples:
            sizes = self.sizes
            sizes[client] = samples
            self._set_sizes(sizes)


class SiteRounds(Rounds):
    """Options as those of `Rounds`; `executor` must be a `SiteExecutor`. What a client does to its
    update before it sends it (its own layers, clipping, compression) and what it keeps are at the
    site. The noise of `privacy`, and the cohorts with it, come from a secret of the server, which
    is in its checkpoints, and not from the seed, which the sites know.

    Args:
        measures: the sites measure the model, on test samples of their own, whenever the global one
            is measured.

    The history has a list more, ``absent``: the clients that were drawn and were not connected.
    Those that were late are in ``failed``; bytes are those of arrays as they were sent, and seconds
    are without waiting for sites.
    """

    executor: SiteExecutor
    clients: SiteClients

    def __init__(self, *args: Any, measures: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.states = ClientStates({}, self.server.layout.dtype, self.server.device, self.world)
        self.measures = measures
        self.roll, self.events = self.executor.roll, self.executor.events
        self.roll.run = secrets.token_hex(8)
        self.history["absent"] = []
        self._absent: list[int] = []
        self._waited = 0.0
        self._begun = False

        # The sites know the run's seed, and whoever knows it could take noise away again, or tell
        # who was in a cohort.
        if self.privacy is not None and self.privacy.noise_multiplier > 0:
            self.privacy.secret = secrets.randbits(62)

    # ------------------------------------------------------------------ the stages

    def select(self, round_: int) -> list[int]:
        privacy = self.privacy
        if privacy is None or privacy.secret is None or privacy.sampling == "poisson":
            return super().select(round_)
        drawn = random.Random(derive_seed(privacy.secret, "cohort", round_))
        return sorted(drawn.sample(range(len(self.clients)), self.per_round))

    def arrive(self, selected: list[int], round_: int) -> list[int]:
        self.roll.round = round_
        if not self._begun:
            self._begun = True
            self.events.say(
                "begin",
                sites=self.roll.names,
                needed=self.roll.needed,
                per_round=self.per_round,
                rounds=self.rounds,
                round=round_,
                algorithm=self.algorithm.name,
            )
        began = time.perf_counter()
        self.roll.wait_for()
        self._waited = time.perf_counter() - began
        for client, name in enumerate(self.roll.names):
            there = self.roll.present.get(name)
            if there is not None:
                self.clients.set_size(client, there.samples)
        self.server.num_samples = len(self.clients.indices)
        cohort = [client for client in selected if self.roll.names[client] in self.roll.present]
        self._absent = [client for client in selected if client not in cohort]
        named = [self._named(cohort), self._named(self._absent)]
        self.events.say("round", round=round_, cohort=named[0], absent=named[1])
        if self._absent:
            print(f"round {round_}: without {', '.join(named[1])}, not connected", flush=True)
        return cohort

    def distribute(self, cohort: Sequence[int]) -> list[CohortMember]:
        return [CohortMember(client, slot) for slot, client in enumerate(cohort)]

    def train(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        def sink(trained: Trained, seconds: float) -> None:
            if trained.integers is not None:
                sums.add(_INTEGERS, trained.integers - self.server.integers, trained.samples)
            self.algorithm.contribute(trained, self.server, sums)
            sums.note(
                trained.slots,
                ok=1.0,
                samples=trained.samples,
                steps=trained.steps,
                loss=trained.loss,
                seconds=seconds,
            )

        self.executor.train(jobs, lambda clients: {}, sink)
        for figure, slots in (("bad", self.executor.bad), ("failed", self.executor.failed)):
            if slots:
                sums.note(list(slots), **{figure: 1.0})

    def evaluate(self) -> dict[str, dict[str, float]]:
        values = super().evaluate()
        if self.measures:
            measured = self.executor.evaluate()
            if measured:
                values["clients"] = measured
                by_client.note_measured(
                    self.history, self.clients, self.server.round - 1, self.executor.measured
                )
        return values

    def _train_all(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        # No other rank waits for this one: what fails here, such as the SuperLink, ends the run as
        # what it is.
        self.train(jobs, sums)

    # ------------------------------------------------------------------ around

    def one_round(self) -> dict[str, dict[str, float]]:
        values = super().one_round()
        history, executor = self.history, self.executor
        self.events.say(
            "round_end",
            round=history["round"][-1],
            brought=self._named(self.last["client"]),
            seconds=history["seconds"][-1],
            loss=history["train"]["loss"][-1],
            values=values,
            unchanged=history["unchanged"][-1],
            dropped=executor.post.dropped,
        )
        return values

    def _note(
        self,
        round_: int,
        cohort: list[int],
        figures: dict[str, torch.Tensor],
        values: dict[str, dict[str, float]],
        seconds: float,
    ) -> None:
        super()._note(round_, cohort, figures, values, seconds - self._waited)
        self.history["bytes_up"][-1] = float(self.executor.received)
        self.history["bytes_down"][-1] = float(self.executor.sent)
        self.history["absent"].append(self._named(self._absent))

    def _say_bad(self, round_: int, clients: Sequence[int]) -> None:
        if self.on_bad_update == "stop":
            reasons = "; ".join(
                f"site {site}: {reason}"
                for site, reason in zip(
                    self._named(clients), self.executor.bad.values(), strict=False
                )
            )
            raise BadUpdateError(
                f"round {round_}: {reasons} (sites.on_bad='skip' goes on without such sites)"
            )

    def _named(self, clients: Sequence[float]) -> list[str]:
        return [self.clients.name(int(client)) for client in clients]

    # ------------------------------------------------------------------ going on

    def state_dict(self) -> dict[str, Any]:
        taken = self.executor.taken
        across = {
            "run": self.roll.run,
            "names": self.roll.names,
            "sizes": torch.from_numpy(self.clients.sizes.copy()),
            "taken": torch.tensor(
                [taken.get(client, -1) for client in range(len(self.clients))], dtype=torch.int64
            ),
            "guard": self.executor.validator.state_dict(),
            "secret": None if self.privacy is None else self.privacy.secret,
        }
        return {**super().state_dict(), "sites": across}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, or from a simulation's checkpoint, whose clients then
        are the sites."""
        super().load_state_dict(state)
        self.history.setdefault("absent", [[] for _ in self.history["round"]])
        across = state.get("sites")
        if across is None:
            return
        if across["names"] != self.roll.names:
            raise UserError(
                f"resume: the checkpoint is of the sites {', '.join(across['names'])}, and this "
                f"run's are {', '.join(self.roll.names)}; give the same names in the same order, "
                "or start anew with resume=null"
            )
        self.roll.run = across["run"]
        for client, (size, taken) in enumerate(
            zip(across["sizes"].tolist(), across["taken"].tolist(), strict=True)
        ):
            self.clients.set_size(client, size)
            if taken >= 0:
                self.executor.taken[client] = taken
        self.server.num_samples = len(self.clients.indices)
        self.executor.validator.load_state_dict(across["guard"])
        if self.privacy is not None and across["secret"] is not None:
            self.privacy.secret = across["secret"]
