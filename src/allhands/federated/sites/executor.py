"""`SiteExecutor`: clients that train elsewhere. One message to each site of the cohort, and every
reply taken in as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from allhands.federated.algorithms.base import Server, Trained
from allhands.federated.executors.base import CohortMember, Executor, ExecutorContext, Sink, States
from allhands.federated.personal import means
from allhands.federated.sites.arrays import BadUpdate, pack, unpack
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.post import Post, Reply, last_line
from allhands.federated.sites.roll import Roll
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.site_request import RECORD, task
from allhands.federated.sites.update_validator import (
    INTEGERS,
    UPDATE,
    UpdateValidator,
    check_measured,
    norm_of,
)

MODEL, FIGURES = "model", "figures"  # the names of records
_NO_WORDS = "its reply says neither what it is nor why it is none"


class SiteExecutor(Executor):
    """Has the clients of a cohort trained at their sites.

    A site that fails, is late or sends what must not enter the average is named and left out of the
    round. What arrives is handed over and forgotten, one reply at a time, so that memory does not
    grow with the number of sites.

    Args:
        work: what is trained; its clients are the sites.
        server: the global model.
        roll: who is there.
        post: carries messages.
        events: what happens is said there.
        settings: how long a round lasts.

    Attributes:
        validator: judges what arrives; to be made anew where sites keep layers of their own, or
        clip. bad, failed: of the last call of `train`: places in the cohort of those whose update
        was
            refused, and of those that have sent none, with the reason.
        sent, received: bytes of arrays of the last call, all sites together.
        taken: the last round of each site (by its number) whose update has entered the model.
        measured: by site (its number) what it measured in the last call of `evaluate`.
    """

    name = "sites"
    together = True

    def __init__(
        self,
        work: ExecutorContext,
        server: Server,
        roll: Roll,
        post: Post,
        events: EventLog,
        settings: Sites,
    ) -> None:
        super().__init__(work, server)
        self.roll, self.post, self.events, self.settings = roll, post, events, settings
        self.validator = UpdateValidator(server.layout, settings, len(server.integers))
        self.bad: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        self.sent = self.received = 0
        self.taken: dict[int, int] = {}
        self.measured: list[tuple[int, dict[str, float]]] = []

    def train(self, jobs: Sequence[CohortMember], states: States, sink: Sink) -> None:
        self.bad, self.failed, self.sent, self.received = {}, {}, 0, 0
        nodes, round_ = self.roll.connected(), self.server.round
        by_site = {self.roll.names[job.client]: job for job in jobs}
        self.validator.begin(self.server.weights)
        model = self._model(self.work.algorithm.beside(self.server))
        contents = [
            (
                site,
                nodes[site],
                RecordDict({RECORD: self._config("train", job.client, len(jobs)), MODEL: model}),
            )
            for site, job in by_site.items()
            if site in nodes
        ]
        sent = self.post.send("train", round_, contents, self.settings.round_timeout)
        self.sent = len(sent) * model.count_bytes()
        del contents
        for site in by_site.keys() - {one.site for one in sent}:
            self._fail(by_site[site], round_, site, "it could not be asked")
        for reply in self.post.replies(
            sent, self.settings.round_timeout, self.roll.greet, self.roll.gone
        ):
            self._take(reply, by_site[reply.sent.site], sink)
            del reply

    def _config(self, kind: str, client: int, cohort: int) -> ConfigRecord:
        clients, since = len(self.work.clients), self.taken.get(client, -1)
        return task(kind, self.roll.run, self.work, self.server, client, clients, cohort, since)

    def _model(self, beside: Mapping[str, torch.Tensor]) -> ArrayRecord:
        return pack({"row": self.server.weights, INTEGERS: self.server.integers, **beside})

    # ------------------------------------------------------------------ what arrives

    def _take(self, reply: Reply, job: CohortMember, sink: Sink) -> None:
        """Hand one reply over, or say why not."""
        sent, config = reply.sent, reply.config
        if reply.content is None and not reply.error:
            self.failed[job.slot] = f"nothing came within {self.settings.round_timeout:g} s"
            self.events.say("late", site=sent.site, round=sent.round, seconds=reply.seconds)
            self._print(sent.site, sent.round, self.failed[job.slot])
        elif reply.content is None:
            self._fail(job, sent.round, sent.site, reply.error)
        elif config.get("status") != "ok":
            self._fail(
                job, sent.round, sent.site, last_line(config.get("reason"), 1000) or _NO_WORDS
            )
        elif (config.get("run"), config.get("round")) != (self.roll.run, sent.round):
            self._fail(job, sent.round, sent.site, "its reply is one of another round or run")
        else:
            self._judge(reply, job, sink)

    def _judge(self, reply: Reply, job: CohortMember, sink: Sink) -> None:
        content, site, round_ = reply.content, reply.sent.site, reply.sent.round
        assert content is not None
        figures, samples = _figures(content), self.work.clients.size(job.client)
        try:
            record = content.get(UPDATE)
            if not isinstance(record, ArrayRecord):
                raise BadUpdate("there is no update in its reply")
            size = record.count_bytes()
            arrays = unpack(record, self._expected())
            reason = self.validator.check(
                site, arrays, figures, samples, self.work.local.num_steps(samples)
            )
            if (
                reason is None
                and self.work.algorithm.needs_start_loss
                and "start_loss" not in figures
            ):
                reason = "it sent no figure 'start_loss'"
        except BadUpdate as error:
            reason = str(error)
        # Whatever a peer has sent, the others' round goes on.
        except Exception as error:
            reason = f"its reply cannot be read: {type(error).__name__}: {last_line(error)}"
        if reason is not None:
            self.bad[job.slot] = reason
            self.events.say("bad", site=site, round=round_, reason=reason)
            self._print(site, round_, f"its update is refused: {reason}")
            return
        self.received += size
        sink(self._trained(job, arrays, figures), figures.get("seconds", reply.seconds))
        self.taken[job.client] = round_
        self.events.say(
            "update",
            site=site,
            round=round_,
            samples=samples,
            steps=int(figures["steps"]),
            loss=figures["loss"],
            norm=norm_of(arrays[UPDATE]),
            seconds=figures.get("seconds"),
            waited=reply.seconds,
            bytes=size,
        )

    def _expected(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        layout, numbers = self.server.layout, len(self.server.integers)
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            UPDATE: (layout.dtype, (layout.length,))
        }
        return {**expected, INTEGERS: (torch.int64, (numbers,))} if numbers else expected

    def _trained(
        self, job: CohortMember, arrays: Mapping[str, torch.Tensor], figures: Mapping[str, float]
    ) -> Trained:
        """What a client in a simulation would have handed over, as far as the server's arithmetic
        looks at it."""
        server, row = self.server, arrays[UPDATE].to(self.server.device)[None]
        lengths = self.work.algorithm.client_state(server)

        def number(name: str) -> torch.Tensor:
            return torch.tensor([figures[name]], dtype=torch.float64, device=server.device)

        return Trained(
            clients=[job.client],
            slots=[job.slot],
            rows=row,
            received=row,
            start=server.weights,
            samples=number("samples").cpu(),
            steps=number("steps").cpu(),
            loss=number("loss"),
            start_loss=number("start_loss") if self.work.algorithm.needs_start_loss else None,
            # The client's own stay at the site; what the sums get of them follows from the update.
            own={name: row.new_zeros(1, length) for name, length in lengths.items()},
            integers=arrays[INTEGERS].to(server.device)[None] if INTEGERS in arrays else None,
        )

    def _fail(self, job: CohortMember, round_: int, site: str, reason: str) -> None:
        self.failed[job.slot] = reason
        self.events.say("failed", site=site, round=round_, reason=reason)
        self._print(site, round_, reason)

    @staticmethod
    def _print(site: str, round_: int, reason: str) -> None:
        print(f"round {round_}: site {site} is left out: {reason}", flush=True)

    # ------------------------------------------------------------------ measuring

    def evaluate(self) -> dict[str, float]:
        """The mean loss over the test samples of all sites that are there, each measured by its own
        model, and where all targets are classes accuracy (0 to 1); empty where no site has measured
        anything."""
        round_ = self.server.round
        present = [
            (self.roll.names.index(site), site, node)
            for site, node in self.roll.connected().items()
            if self.roll.present[site].tests
        ]
        model = self._model({})
        contents = [
            (
                site,
                node,
                RecordDict({RECORD: self._config("evaluate", client, len(present)), MODEL: model}),
            )
            for client, site, node in present
        ]
        measured: dict[str, dict[str, float]] = {}
        sent = self.post.send("evaluate", round_, contents, self.settings.round_timeout)
        for reply in self.post.replies(
            sent, self.settings.round_timeout, self.roll.greet, self.roll.gone
        ):
            site, config = reply.sent.site, reply.config
            figures = {} if reply.content is None else _figures(reply.content)
            there = self.roll.present.get(site)
            reason = reply.error or (
                f"nothing came within {self.settings.round_timeout:g} s"
                if reply.content is None
                else None
            )
            if reason is None and config.get("status") != "ok":
                reason = last_line(config.get("reason")) or _NO_WORDS
            if reason is None:
                reason = check_measured(figures, there.tests if there is not None else -1)
            if reason is not None:
                self.events.say(
                    "failed",
                    site=site,
                    round=round_,
                    reason=f"it has not measured the model: {reason}",
                )
                self._print(site, round_, f"it has not measured the model: {reason}")
                continue
            measured[site] = figures
            self.events.say(
                "evaluated",
                site=site,
                round=round_,
                count=figures["count"],
                **means(_totals(figures)),
            )
        # In one order, whichever came first.
        rows = [
            (client, _totals(measured[site]))
            for client, site in enumerate(self.roll.names)
            if site in measured
        ]
        self.measured = [(client, means(row)) for client, row in rows if row[0]]
        totals = [sum(column) for column in zip(*(row for _, row in rows), strict=True)]
        return means(totals) if totals and totals[0] else {}


def _figures(content: RecordDict) -> dict[str, float]:
    record = content.get(FIGURES)
    if not isinstance(record, MetricRecord):
        return {}
    return {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}


def _totals(figures: Mapping[str, float]) -> list[float]:
    """As `allhands.federated.personal.measure` gives them."""
    return [figures[name] for name in ("count", "loss", "classed", "right")]
