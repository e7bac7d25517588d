"""The rounds of `Rounds`, whose stages ask a `BaseServer` and its clients."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.atomic_write import atomic_write
from allhands.comm import all_gather_text, broadcast_ints, broadcast_tensors
from allhands.data import derive_seed, preserved_generators, seed_everything
from allhands.errors import UserError, kind_of
from allhands.federated.algorithms import FedAvg, Server, Trained
from allhands.federated.coala.client import BaseClient, tests_itself, trains_itself
from allhands.federated.coala.config import Config
from allhands.federated.coala.pool import Pool, fresh
from allhands.federated.coala.server import BaseServer, overridden
from allhands.federated.coala.testing import gather, measure, together
from allhands.federated.executors import CohortMember, Executor, ExecutorContext
from allhands.federated.rounds import Rounds
from allhands.federated.sums import Sums
from allhands.world import World

_TEST_BATCH = 64


class Uploads(FedAvg):
    """Every process gets the models of the whole cohort, for a server with an `aggregate` of its
    own."""

    name = "uploads"

    def __init__(self) -> None:
        super().__init__()
        self.cohort = 0

    def vectors(self, server: Server) -> dict[str, int]:
        return {f"client {slot}": server.layout.length for slot in range(self.cohort)}

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        # Weighted, although each sum has one term, since sums are exact for weights that come to
        # about 1 over the cohort.
        for slot, row, weight in zip(
            trained.slots, trained.updates, self.weights(trained), strict=True
        ):
            sums.add(f"client {slot}", row[None], weight[None])

    def rows(self, server: Server, sums: Sums) -> tuple[list[torch.Tensor], list[float]]:
        """The models of those that have trained, in the order of the cohort, and their numbers of
        samples."""
        figures = sums.figures()
        slots = figures["ok"].nonzero().flatten().tolist()
        rows = [
            (server.weights + sums.mean(f"client {slot}")).to(server.layout.dtype) for slot in slots
        ]
        return rows, [float(figures["samples"][slot]) for slot in slots]

    def aggregate(self, server: Server, sums: Sums) -> None:
        """The server's own `aggregate` does it."""


class ServerRounds(Rounds):
    """Rounds whose stages are the methods of a `BaseServer`.

    Args:
        work, server, executor, world: see `Rounds`.
        conf: the configuration.
        coala: the registered server's object.
        pool: the clients as objects.
        template: a model whose copies get the global weights.
    """

    def __init__(
        self,
        work: ExecutorContext,
        server: Server,
        executor: Executor,
        world: World,
        conf: Config,
        coala: BaseServer,
        pool: Pool,
        template: nn.Module,
    ) -> None:
        per_round = conf.server.clients_per_round
        super().__init__(
            work,
            server,
            executor,
            world,
            per_round=per_round,
            rounds=conf.server.rounds,
            evaluate_every=conf.server.test_every,
            on_client_failure=conf.on_client_failure,
            systems=conf.resource_heterogeneous.systems(len(work.clients), work.seed),
        )
        self.conf, self.coala, self.pool = conf, coala, pool
        self.template = template
        self.objects = trains_itself(pool.kind)
        self._jobs: Sequence[CohortMember] = ()
        self._handed = False
        self._sums: Sums | None = None
        coala._rounds = self
        if conf.server.visualize and not (
            overridden(coala, "init_visualization") and overridden(coala, "tracking_visualization")
        ):
            raise UserError(
                "server.visualize = True calls init_visualization and tracking_visualization of a "
                f"registered server, and {type(coala).__name__} lacks one of them; leave it out"
            )
        if conf.client.local_test and pool.kind.test_local is BaseClient.test_local:
            raise UserError(
                "client.local_test = True calls test_local of a registered client, and there is "
                "none; leave it out"
            )

    # ------------------------------------------------------------------ stages

    def one_round(self) -> dict[str, dict[str, float]]:
        coala, before = self.coala, self.server.round
        coala.pre_train()
        coala.train()
        if self.server.round != before + 1:
            raise UserError(
                f"{type(coala).__name__}.train trained no round; call super().train() in it"
            )
        coala.post_train()
        values = self.test(before) if super().due(before) else {}
        if self.world.is_main and (
            (before + 1) % self.conf.server.save_model_every == 0 or before + 1 == self.rounds
        ):
            coala.save_model()
        measured = "".join(f", test {name} {value:.4f}" for name, value in values.items())
        loss, seconds = self.history["train"]["loss"][-1], self.history["seconds"][-1]
        self.say(
            f"{self._title()}round {before + 1}/{self.rounds}: train loss {loss:.4f}, "
            f"{seconds:.2f} s{measured}"
        )
        return {"test": values} if values else {}

    def stages(self) -> None:
        """Select, distribute, train, aggregate."""
        super().one_round()

    def due(self, round_: int) -> bool:
        return False  # `one_round` tests itself, after `post_train`

    def ends(self) -> bool:
        """What the first process's `should_terminate` says."""
        if not overridden(self.coala, "should_terminate"):
            return False
        return bool(
            broadcast_ints(
                [int(self.coala.should_terminate())] if self.world.is_main else None, self.world
            )[0]
        )

    def draw(self, number: int) -> list[int]:
        """The cohort without an override."""
        if not self.conf.server.random_selection:
            return list(range(number))
        drawn = random.Random(derive_seed(self.conf.seed, "cohort", self.server.round))
        return sorted(drawn.sample(range(len(self.clients)), number))

    def select(self, round_: int) -> list[int]:
        with preserved_generators():
            seed_everything(derive_seed(self.conf.seed, "selection", round_))
            chosen = self.coala.selection(self.pool, self.per_round)
        chosen = self.coala.selected_clients if chosen is None else chosen
        self.coala.selected_clients = list(chosen)
        numbers = [getattr(client, "number", None) for client in chosen]
        name = type(self.coala).__name__
        if not numbers or not all(isinstance(number, int) for number in numbers):
            raise UserError(
                f"{name}.selection gave {chosen!r:.200}; it must give at least one of the clients "
                "that it gets"
            )
        if len(set(numbers)) != len(numbers):
            raise UserError(
                f"{name}.selection gave a client twice: {sorted(client.cid for client in chosen)}"
            )
        cohort = broadcast_ints(
            [int(number) for number in numbers if number is not None], self.world
        )
        if isinstance(self.algorithm, Uploads):
            self.algorithm.cohort = len(cohort)
        self.coala.grouping_for_distributed()
        self.coala.compression()
        return cohort

    def distribute(self, cohort: Sequence[int]) -> list[CohortMember]:
        ranks, rank = self.world.world_size, self.world.rank
        self._handed = False
        self.queue.begin(self.server.round, [])
        if self.objects:  # an object that is trained here now must be trained here again
            return [
                CohortMember(client, slot)
                for slot, client in enumerate(cohort)
                if client % ranks == rank
            ]
        strategy = self.conf.resource_heterogeneous.grouping_strategy
        slots = list(range(len(cohort)))
        if strategy == "greedy":
            return super().distribute(cohort)
        if strategy == "random":
            random.Random(derive_seed(self.conf.seed, "grouping", self.server.round)).shuffle(slots)
        else:
            slots.sort(key=lambda slot: (self.clients.size(cohort[slot]), slot))
        share = -(-len(slots) // ranks)
        return [
            CohortMember(cohort[slot], slot) for slot in slots[rank * share : (rank + 1) * share]
        ]

    def train(self, jobs: Sequence[CohortMember], sums: Sums) -> None:
        if self._handed:  # clients that were left for whoever is ready first
            super().train(jobs, sums)
            return
        self._jobs, self._sums = jobs, sums
        self.coala.distribution_to_train()
        self._called(self._handed, "distribution_to_train")

    def train_cohort(self) -> None:
        """Train this process's part of the cohort."""
        assert self._sums is not None
        self._handed = True
        super().train(self._jobs, self._sums)

    def aggregate(self, sums: Sums) -> None:
        self._sums = sums
        self.coala.aggregation()
        self._called(self._sums is None, "aggregation")

    def _called(self, done: bool, name: str) -> None:
        if not done:
            raise UserError(
                f"{type(self.coala).__name__}.{name} left its work undone; call super().{name}() "
                "in it"
            )

    def apply(self) -> None:
        """Change the global model by what the cohort has learnt."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        if not isinstance(self.algorithm, Uploads):
            super().aggregate(sums)
            return
        rows, weights = self.algorithm.rows(self.server, sums)
        models = []
        for row in rows:
            models.append(fresh(self.template, self.server))
            self.server.layout.write(row, models[-1])
        self.replace_model(self.coala.aggregate(models, weights))

    # ------------------------------------------------------------------ the model

    def model(self) -> nn.Module:
        """A copy of the global model."""
        return fresh(self.template, self.server)

    def replace_model(self, given: Any) -> None:
        """Take the weights of a model or a state dict; those of the first process count."""
        if isinstance(given, dict):
            made = self.model()
            made.load_state_dict(given)
            given = made
        if not isinstance(given, nn.Module):
            raise UserError(
                f"{type(self.coala).__name__}: {kind_of(given)} is no global model; give a model "
                "or its state dict"
            )
        row = self.server.layout.read(given).to(self.server.device)
        broadcast_tensors([row], self.world)
        self.server.weights.copy_(row)

    def save(self) -> None:
        """Write the global model's state dict."""
        folder = Path(self.conf.server.save_model_path or "saved_models")
        folder.mkdir(parents=True, exist_ok=True)
        task = f"{self.conf.task_id}_" if self.conf.task_id else ""
        path = folder / f"{task}global_model_r_{self.server.round}.pth"
        weights = {name: value.cpu() for name, value in self.model().state_dict().items()}
        with atomic_write(path) as aside:
            torch.save(weights, aside)

    # ------------------------------------------------------------------ testing

    def test(self, round_: int) -> dict[str, float]:
        """Test the global model and note it in the history."""
        self.coala.pre_test()
        values = json.loads(
            all_gather_text(json.dumps(self._numbers(self.coala.test())), self.world)[0]
        )
        self._note_values(round_, "test", values)
        self.coala.post_test()
        if self.conf.server.visualize:
            self.coala.tracking_visualization(values)
        if round_ < 0:
            self.say(
                f"{self._title()}before round 1"
                + "".join(f", test {name} {value:.4f}" for name, value in values.items())
            )
        return dict(values)

    def _numbers(self, values: Any) -> dict[str, float]:
        try:
            return {str(name): float(value) for name, value in dict(values).items()}
        except (TypeError, ValueError):
            raise UserError(
                f"{type(self.coala).__name__}'s test gave {values!r:.200}; it must give a dict of "
                "numbers"
            ) from None

    def test_in_server(self) -> dict[str, float]:
        """On the whole test set."""
        return self._measure(None, self.conf.server.batch_size)

    def test_in_client(self) -> dict[str, float]:
        testing, test = [client.number for client in self.coala.get_test_clients()], self.pool.test
        if test is not None and test.clients is not None:
            users = set(test.users)
            testing = [client for client in testing if self.clients.name(client) in users]
        if tests_itself(self.pool.kind):
            return self._by_objects(testing)
        parts = None
        if test is not None and test.clients is not None:
            parts = [test.indices(self.clients.name(client)) for client in testing]
        # Means over samples do not depend on the batches, whose time does: COALA's 5 is a third as
        # fast. A number that the user has written counts.
        client = self.conf.client
        written = "test_batch_size" in client.model_fields_set
        return self._measure(parts, client.test_batch_size if written else _TEST_BATCH)

    def _by_objects(self, testing: Sequence[int]) -> dict[str, float]:
        own, model = {}, self.model()
        for client in testing:
            if client % self.world.world_size == self.world.rank:
                with preserved_generators():
                    seed_everything(derive_seed(self.conf.seed, "test", self.server.round, client))
                    self.server.layout.write(self.server.weights, model)
                    own[client] = self._numbers(self.pool[client].run_test(model, self.conf.client))
        found = gather(own, self.world)
        names = sorted({name for values in found.values() for name in values})
        weights = {
            client: self._test_size(client) if self.conf.test_method == "weighted" else 1.0
            for client in found
        }
        total = sum(weights.values())
        return {
            name: sum(weights[client] * found[client][name] for client in sorted(found)) / total
            for name in names
        }

    def _test_size(self, client: int) -> float:
        return float(self._test_data().size(self.clients.name(client)))

    def _measure(self, parts: Sequence[torch.Tensor] | None, batch_size: int) -> dict[str, float]:
        test = self._test_data()
        if parts is None:
            parts = [test.indices()]
        elif not parts:
            raise UserError(
                "test_mode: test_in_client, and no client that tests has test samples; write "
                "test_mode: test_in_server, or server.test_all: true"
            )
        loss_fn = self.pool[0].load_loss_fn(self.conf.client)
        values, sizes = measure(
            self.model(), test.samples, parts, batch_size, loss_fn, self.world, self.conf.seed
        )
        return together(values, sizes, self.conf.test_method == "weighted")

    def _test_data(self) -> Any:
        if self.pool.test is None:
            raise UserError("there is no test set; register_dataset(train, test) takes one")
        return self.pool.test

    # ------------------------------------------------------------------ what is told

    def say(self, text: str) -> None:
        """Print from the first process."""
        if self.world.is_main and self.conf.tracking.log_level in ("DEBUG", "INFO"):
            print(text, flush=True)

    def _title(self) -> str:
        return f"{self.conf.task_id}: " if self.conf.task_id else ""
