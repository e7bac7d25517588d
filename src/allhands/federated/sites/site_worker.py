"""What a site does with a message: the model, the data, the optimizer and the device stay, and
arrays come and go."""

from __future__ import annotations

import copy
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import nn

from allhands.data import preserved_generators
from allhands.data.build import Source, sources_from_datasets
from allhands.errors import UserError
from allhands.federated.algorithms.base import Server, Trained
from allhands.federated.clients import Clients
from allhands.federated.executors import ClientError, CohortMember, Executor, ExecutorContext
from allhands.federated.federated_training import (
    local_training,
    make_executor,
    number_of_rounds,
    samples_of,
    test_source,
    trained_source,
)
from allhands.federated.personal import keep_own, measure
from allhands.federated.rounds import Rounds
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.federated.sites.arrays import BadUpdate, Expected, check_dtype, pack, unpack
from allhands.federated.sites.definition import Definition
from allhands.federated.sites.describe import describe, differences
from allhands.federated.sites.site_keys import prove
from allhands.federated.sites.site_request import Refusal, SiteRequest, last_line
from allhands.federated.sites.site_state import SiteState
from allhands.world import current_world, init


@dataclass
class _Place:
    """A site as one client among all of them: the objects that its number decides."""

    client: int
    clients: int
    rounds: Rounds
    executor: Executor
    state: SiteState
    tests: tuple[Samples, torch.Tensor] | None


class _Apart:
    """In place of `Sums`, where only what a client keeps for itself is wanted."""

    share = scale = 1.0

    def add(self, name: str, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Nothing: the server adds."""

    def note(self, slots: Sequence[int], **figures: Any) -> None:
        """Nothing: the server notes."""


class SiteWorker:
    """One site's part of a federated training, message by message; the same arithmetic as a
    simulation's client.

    Args:
        definition: the training, with the site's own data.
        name: the site's.
        state: folder for what the site keeps between rounds.
        token: of which the answer to "hello" has a proof; None: none.
        say: takes a line for the site's operator.

    Raises:
        UserError: the training cannot be had across sites, or the data cannot be read.
    """

    def __init__(
        self,
        definition: Definition,
        name: str,
        state: Path,
        token: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        definition.validate()
        self.definition, self.name, self.token = definition, name, token
        self.folder, self.say = Path(state), say or (lambda line: None)
        self.world = current_world() or init(device=definition.device)
        with preserved_generators():
            sources = sources_from_datasets(definition.datasets, definition.seed)
            self.source = trained_source(sources)
            self.samples = samples_of(self.source, self.world.device)
        if len(self.samples) == 0:
            raise UserError(
                "the site's data set has no sample to train on; name its folder by --data"
            )
        self.tested = self._tested(sources)
        model, strategy = definition.model.to(self.world.device), definition.strategy
        if isinstance(definition.criterion, nn.Module):
            definition.criterion.to(self.world.device)
        self.local = local_training(definition, strategy, self.source, definition.runner)
        self.layout = RowLayout(model, self.local.optimizer.groups)
        check_dtype(self.layout.parameters[0].name, self.layout.dtype)
        self.placed = self._place(0, 1)  # until a request says which client this is
        work, server = self.placed.rounds.work, self.placed.rounds.server
        labels = (
            definition.labels
            if definition.labels is not None
            else getattr(self.source.dataset, "classes", None)
        )
        self.description = describe(work, server, strategy, labels)

    @property
    def num_samples(self) -> int:
        """Samples that are trained on."""
        return self.placed.rounds.clients.size(self.placed.client)

    @property
    def num_tests(self) -> int:
        """Samples on which models are measured."""
        return 0 if self.placed.tests is None else len(self.placed.tests[1])

    def _tested(self, sources: dict[str, Source]) -> Samples | None:
        """The site's own test samples, where they are not a part of those that it trains on."""
        source = test_source(sources)
        if self.definition.strategy.test_fraction is not None or source is None:
            return None
        return samples_of(source, self.world.device)

    def _place(self, client: int, clients: int) -> _Place:
        definition, strategy, world = self.definition, self.definition.strategy, self.world
        # Everyone else's samples are elsewhere; the number decides what is drawn.
        offsets = np.where(np.arange(clients + 1) > client, len(self.samples), 0)
        who, tests = Clients.from_arrays(np.arange(len(self.samples)), offsets), None
        fraction = strategy.test_fraction
        if (
            fraction is not None
            and min(int(len(self.samples) * fraction), len(self.samples) - 1) > 0
        ):
            who, held = who.split(fraction, definition.seed)
            tests = (self.samples, held.samples(client))
        if self.tested is not None and len(self.tested):
            tests = (self.tested, torch.arange(len(self.tested)))
        model = definition.model
        server = Server.of(model, self.layout, world.device, clients, definition.seed)
        work = ExecutorContext(
            copy.deepcopy(model),
            self.local,
            copy.deepcopy(strategy.algorithm),
            self.samples,
            who,
            definition.seed,
        )
        executor = make_executor(strategy.executor, work, server)
        rounds = Rounds(
            work,
            server,
            executor,
            world,
            per_round=clients,
            rounds=number_of_rounds(definition, strategy),
            on_bad_update="skip",
            local_layers=strategy.local_layers,
            compression=strategy.compression,
        )
        state = SiteState(self.folder, rounds.states.lengths, self.layout.dtype)
        return _Place(client, clients, rounds, executor, state, tests)

    # ------------------------------------------------------------------ messages

    def handle(self, request: RecordDict) -> RecordDict:
        """The reply to a request. Never raises: what goes wrong is the reason of a refusal, with
        which the server names the site."""
        kind = "message"
        try:
            asked = SiteRequest(request)
            kind = asked.text("kind")
            if kind not in ("hello", "train", "evaluate"):
                raise Refusal(
                    "this site knows no such message; install the server's version of allhands"
                )
            return getattr(self, f"_{kind}")(asked)
        except ClientError as error:
            traceback.print_exception(error.__cause__ or error, file=sys.stderr)
            reason = last_line(error.__cause__ or error)
        except (BadUpdate, UserError, Refusal) as error:
            reason = str(error)
        except Exception as error:
            traceback.print_exc()
            reason = last_line(error)
        self.say(f"{kind} refused: {reason}")
        return self._reply({"status": "refused", "reason": reason})

    def _hello(self, asked: SiteRequest) -> RecordDict:
        try:
            theirs = json.loads(asked.text("description"))
        except ValueError:
            raise Refusal("the server's description is not JSON") from None
        found = differences(self.description, theirs)
        classes = theirs.get("labels") if isinstance(theirs, dict) else None
        highest = self._highest_class()
        if not found and isinstance(classes, list) and highest >= len(classes):
            found = [
                f"a sample here is of class {highest}, and the server names {len(classes)} "
                "classes, from 0"
            ]
        if found:
            reason = "; ".join(found)
            self.say(f"this site does not match the server: {reason}")
            return self._reply({"status": "refused", "reason": reason})
        config: dict[str, Any] = {"status": "ok"}
        if self.token is not None:
            config["proof"] = prove(self.token, asked.text("challenge"), self.name)
        self.say(
            f"the server and this site agree: {self.num_samples:,} samples to train on, "
            f"{self.num_tests:,} to test"
        )
        return self._reply(config, {"samples": self.num_samples, "tests": self.num_tests})

    def _train(self, asked: SiteRequest) -> RecordDict:
        placed, round_ = self._begin(asked)
        rounds, server = placed.rounds, placed.rounds.server
        run, since = asked.text("run"), asked.number("since", None)
        self._set_rates(asked)
        states = rounds.states
        states.kept = {}
        if states:
            kept = placed.state.load(run, round_, since)
            if kept is not None:
                states.put(
                    [placed.client],
                    {name: vector[None].to(server.device) for name, vector in kept.items()},
                )
        made: list[tuple[dict[str, torch.Tensor], dict[str, float]]] = []

        def sink(trained: Trained, seconds: float) -> None:
            made.append(self._made(rounds, trained, seconds))

        placed.executor.train([CohortMember(placed.client, 0)], states.get, sink)
        ((update, figures),) = made
        if states:
            placed.state.save(run, round_, since, states.kept[placed.client])
        self.say(
            f"round {round_ + 1}: {figures['samples']:,.0f} samples, {figures['steps']:.0f} steps, "
            f"loss {figures['loss']:.4f}, {figures['seconds']:.2f} s"
        )
        reply = self._reply({"status": "ok", "run": run, "round": round_}, figures)
        edges = {
            0,
            self.layout.length,
            *(edge for place in self.layout.places for edge in (place.start, place.stop)),
        }
        reply["update"] = pack(
            update, sorted(edges) if self.definition.strategy.compression is not None else None
        )
        return reply

    def _made(
        self, rounds: Rounds, trained: Trained, seconds: float
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What is sent of a client that has trained: what `Rounds.train` does with it before it is
        added up."""
        server, strategy = rounds.server, self.definition.strategy
        total = float(trained.rows.sum(dtype=torch.float64)) + float(
            0.0 if trained.start_loss is None else trained.start_loss
        )
        if not np.isfinite(total):
            raise Refusal(
                "the model came out with NaN or Inf; lower the clients' learning rate or set "
                "clip_norm"
            )
        keep_own(trained, server)
        if strategy.privacy is not None:
            strategy.privacy.bound(trained)
        rounds.traffic.narrow(trained, server)
        update = {"update": trained.updates[0]}
        if trained.integers is not None:
            update["integers"] = trained.integers[0]
        if rounds.algorithm.client_state(server):
            rounds.algorithm.contribute(trained, server, _Apart())  # type: ignore[arg-type]
        if rounds.states:
            rounds.states.put(trained.clients, trained.own)
        figures = {
            "samples": float(trained.samples),
            "steps": float(trained.steps),
            "loss": float(trained.loss),
            "seconds": seconds,
        }
        if trained.start_loss is not None:
            figures["start_loss"] = float(trained.start_loss)
        return update, figures

    def _evaluate(self, asked: SiteRequest) -> RecordDict:
        placed, round_ = self._begin(asked)
        if placed.tests is None:
            raise Refusal(
                "this site has no test samples; write strategy.test_fraction, or give it a data "
                "set 'valid'"
            )
        rounds, states = placed.rounds, placed.rounds.states
        states.kept, began = {}, time.perf_counter()
        if states:
            kept = placed.state.load(asked.text("run"), round_, asked.number("since", None))
            if kept is not None:
                states.put(
                    [placed.client],
                    {name: vector[None].to(rounds.server.device) for name, vector in kept.items()},
                )
        samples, indices = placed.tests
        totals = measure(
            rounds.work, rounds.server, states.get([placed.client]), placed.client, samples, indices
        )
        figures = dict(zip(("count", "loss", "classed", "right"), totals.tolist(), strict=True))
        self.say(
            f"after round {round_}: loss {figures['loss'] / figures['count']:.4f} over "
            f"{figures['count']:,.0f} test samples"
            + (f", {figures['right'] / figures['classed']:.1%} right" if figures["classed"] else "")
        )
        return self._reply(
            {"status": "ok", "run": asked.text("run"), "round": round_},
            {**figures, "seconds": time.perf_counter() - began},
        )

    # ------------------------------------------------------------------ parts

    def _begin(self, asked: SiteRequest) -> tuple[_Place, int]:
        """Take over the server's model and what its algorithm sends beside, for the round that is
        asked for."""
        client, clients, round_ = (
            asked.number("client"),
            asked.number("clients"),
            asked.number("round"),
        )
        if not 0 <= client < clients <= 100_000 or round_ < 0:
            raise Refusal(f"there is no client {client} of {clients} in round {round_}")
        seed = asked.number("seed")
        if seed != self.definition.seed:
            raise Refusal(f"seed is {self.definition.seed} here and {seed} at the server")
        if (client, clients) != (self.placed.client, self.placed.clients):
            self.placed = self._place(client, clients)
        placed = self.placed
        server, algorithm = placed.rounds.server, placed.rounds.algorithm
        beside, layout = algorithm.beside(server), self.layout
        given = asked.arrays("model")
        expected: Expected = {
            "row": (layout.dtype, (layout.length,)),
            **{name: (vector.dtype, tuple(vector.shape)) for name, vector in beside.items()},
        }
        if layout.integers or "integers" in given:
            expected = {**expected, "integers": (torch.int64, tuple(server.integers.shape))}
        arrays = unpack(given, expected)
        for name, vector in arrays.items():
            if vector.is_floating_point() and not np.isfinite(
                float(vector.sum(dtype=torch.float64))
            ):
                raise Refusal(f"the server's '{name}' holds NaN or Inf")
        server.weights.copy_(arrays["row"])
        server.integers.copy_(arrays.get("integers", server.integers))
        for name, vector in beside.items():
            vector.copy_(arrays[name])
        server.round = round_
        return placed, round_

    def _set_rates(self, asked: SiteRequest) -> None:
        """Let the optimizer have what the server's schedule has made of its options."""
        options = self.local.optimizer.options
        rates = asked.get("lr")
        rates = [rates] * len(options) if isinstance(rates, (int, float)) else list(rates)
        changed: list[dict[str, Any]] = [{"lr": rate} for rate in rates]
        if asked.get("options", None) is not None:
            changed = [
                {**one, **more}
                for one, more in zip(changed, json.loads(asked.text("options")), strict=True)
            ]
        if len(changed) != len(options):
            raise Refusal(
                f"the server's optimizer has {len(changed)} groups, and this site's {len(options)}"
            )
        for own, theirs in zip(options, changed, strict=True):
            for name, value in theirs.items():
                if name not in own:
                    raise Refusal(f"the optimizer has no option '{name}' here")
                own[name] = tuple(value) if isinstance(value, list) else value

    def _highest_class(self) -> int:
        """The highest class that the site has samples of; -1 where targets are no classes, or
        cannot be seen at once."""
        targets = self.samples.targets()
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            return -1
        return int(targets.max())

    def _reply(self, config: dict[str, Any], figures: dict[str, float] | None = None) -> RecordDict:
        reply = RecordDict({"allhands": ConfigRecord({**config, "site": self.name})})
        if figures is not None:
            reply["figures"] = MetricRecord({name: float(value) for name, value in figures.items()})
        return reply
