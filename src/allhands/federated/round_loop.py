"""What a runner does around the rounds of a federated training: checkpoints, signals, schedules,
callbacks, logs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.checkpoint import RoundCheckpoints
from allhands.federated.elastic_rounds import ElasticRounds
from allhands.federated.report import report
from allhands.federated.rounds import Rounds
from allhands.loop import checkpoint
from allhands.loop.agreement import Decision
from allhands.loop.announce import report_epoch
from allhands.loop.joining import ends_with_a_worker
from allhands.loop.lifecycle import Lifecycle
from allhands.loop.loggers import Loggers, loggers_of, wanted
from allhands.loop.peak import in_words, taken
from allhands.loop.reporter import Pace, Reporter
from allhands.loop.run_report import about_the_run, run_file_of
from allhands.loop.schedule import Schedule, learning_rates
from allhands.report.history import History
from allhands.report.page import NAME
from allhands.runner.callbacks import run_hooks
from allhands.runner.handed_back import gather
from allhands.runner.train_settings import TrainSettings
from allhands.world import World

Values = dict[str, dict[str, float]]


class RoundLoop(Lifecycle):
    """One federated training on one rank; what callbacks know as `training`, with rounds for epochs
    and for steps.

    Attributes:
        rounds: the stages.
        model: holds the global model after every round.
        valid_loader: whose `main_metric` decides what is best; "train" where nothing is evaluated.
        best, best_round: the best value so far, and after how many rounds.
    """

    period = counted = "round"
    elastic: ElasticRounds | None = None
    _loggers: Loggers | None = None
    settings: TrainSettings
    checkpoints: RoundCheckpoints

    def __init__(
        self,
        settings: TrainSettings,
        world: World,
        reporter: Reporter,
        rounds: Rounds,
        evaluated: list[str],
        elastic: ElasticRounds | None = None,
    ) -> None:
        self.rounds, self.elastic, self.world = rounds, elastic, world
        if elastic is not None:
            elastic.loop = self
            elastic.attach(self)
            self.regrouped = self._open_loggers
        self.model, self.optimizer = settings.model, settings.optimizer
        self.num_epochs = rounds.rounds
        self.schedule = Schedule(settings.scheduler)
        self.best: float | None = None
        self.best_round = 0
        self._best_state: dict[str, torch.Tensor] | None = None
        self._pace = Pace()
        super().__init__(settings, world, reporter, RoundCheckpoints)
        self.valid_loader = self._choose_valid_loader(evaluated)

    @property
    def step(self) -> int:
        """Finished rounds: steps of the server."""
        return self.epoch

    @property
    def history(self) -> History:
        """What `SupervisedRunner.train` returns: that of the rounds, and the clients' learning
        rate, ``"lr"``."""
        return self.rounds.history

    def log(self, name: str, value: float | torch.Tensor, count: float = 1) -> None:
        """Refused: what it averages are steps, which clients take."""
        raise UserError(
            f"training.log({name!r}, …) averages over optimizer steps, which clients take in "
            "federated training; "
            f"append to training.history.setdefault({name!r}, []) in on_epoch_end, on every rank"
        )

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, as `Training.gather` gives it."""
        return gather(value, self.world)

    def save_checkpoint(self) -> None:
        """Refused: it is for the middle of an epoch, and rounds are saved as a whole."""
        raise UserError(
            "training.save_checkpoint() is for the middle of an epoch; rounds are saved at their "
            "end: set save_every=1"
        )

    def read_model(self) -> None:
        """Let the global model be what `model` holds."""
        server = self.rounds.server
        server.weights.copy_(server.layout.read(self.model))
        server.integers.copy_(server.layout.read_integers(self.model))

    def write_model(self) -> None:
        """Copy the global model into `model`."""
        server = self.rounds.server
        server.layout.write(server.weights, self.model)
        server.layout.write_integers(server.integers, self.model)

    def run(self) -> History:
        """All rounds that are left.

        Raises:
            SystemExit: SIGTERM or SIGUSR1 came; all ranks have saved a checkpoint after the same
                round. The code is 128 plus the signal's number.
        """
        settings = self.settings
        with self:
            self._open_loggers()
            try:
                self._train()
            finally:
                if self._loggers is not None:
                    self._loggers.close()
            self.finish()
            if settings.load_best_on_end and not self.signal:
                self._load_best()
        self._write_report()
        return self.history

    def _open_loggers(self) -> None:
        rows, step = len(self.history["round"]), self.epoch or None
        self._loggers = loggers_of(
            self.settings, self.world, self.reporter, self._loggers, rows, step, "round"
        )

    def unit(self, do: Callable[[], Any]) -> Any:
        return do() if self.elastic is None else self.elastic.run(do)

    def check_schedule(self) -> str:
        rounds = self.num_epochs
        return self.schedule.check_length(rounds, rounds, self.epoch, self.epoch, epoch="round")

    def begin(self) -> None:
        self._set_options()

    def _write_report(self) -> None:
        """``report.html`` into the logdir."""
        logdir, rounds, local = self.settings.logdir, self.rounds, self.rounds.work.local
        if self.world.rank or logdir is None or not self.history["round"] or not wanted():
            return
        settings = {
            "algorithm": rounds.algorithm.name,
            "clients": len(rounds.clients),
            "clients a round": rounds.per_round,
            "rounds": rounds.rounds,
            "samples": len(rounds.clients.indices),
            "local epochs": local.epochs,
            "local steps": local.steps,
            "batch size": local.batch_size,
            "optimizer": type(self.optimizer).__name__,
            "learning rate at the end": learning_rates(self.optimizer)[0],
            "executor": rounds.executor.name,
            "workers": self.world.world_size,
            "device": self.world.device.type,
            "seed": rounds.work.seed,
        }
        path = Path(logdir) / NAME
        memory = in_words([taken(self.world)], self.world)
        report(
            self.history,
            path,
            last=rounds.last or None,
            sizes=rounds.clients.sizes.tolist(),
            settings={key: value for key, value in settings.items() if value is not None},
            names=rounds.clients.names,
            more=[*run_file_of(logdir), *about_the_run(self, self.times.parts("rounds"), memory)],
        )
        self.reporter.line(f"report in {path}")

    def _train(self) -> None:
        run_hooks(self.settings.callbacks, "on_train_start", self)
        while self.epoch < self.num_epochs and not self.ended:
            self._round()
        if self.signal:
            return
        run_hooks(self.settings.callbacks, "on_train_end", self)
        if self.stop_reason is not None:
            self.reporter.line(f"stopped {self.where}: {self.stop_reason}")

    def _round(self) -> None:
        run_hooks(self.settings.callbacks, "on_epoch_start", self)
        rates = learning_rates(self.optimizer)
        measured = self.rounds.due(self.epoch)
        values = {"train": {"loss": math.nan}, **self._compute()}
        self.epoch = self.global_step = self.rounds.server.round
        self.write_model()
        history = self.history
        values["train"]["loss"] = history["train"]["loss"][-1]
        history.setdefault("lr", []).append(rates[0])
        improved = measured and self._update_best(values)
        if measured:
            run_hooks(self.settings.callbacks, "on_row_end", self)
            run_hooks(self.settings.callbacks, "on_epoch_end", self)
        if self.schedule.scheduler is not None and (measured or not self.schedule.needs_metric):
            self.schedule.step(self._main(values))
            self._set_options()
        self._remember(measured, improved, values)
        assert self._loggers is not None
        self._loggers.epoch(self.epoch, self.step, values, rates, history["seconds"][-1])
        if self._pace.due(self.epoch):
            self.reporter.progress("rounds", self.epoch, self.num_epochs, values["train"]["loss"])
        if measured:
            self._report(values, rates, improved)

    def _compute(self) -> Values:
        return self.rounds.one_round() if self.elastic is None else self.elastic.round()

    def _remember(self, measured: bool, improved: bool, values: Values) -> None:
        """Save when that is due, and learn whether a signal came."""
        settings, number, elastic = self.settings, self.epoch, self.elastic
        if elastic is not None:
            elastic.leave_if_told()
        if settings.logdir is None:
            if improved and settings.load_best_on_end:
                self._best_state = {
                    key: value.detach().cpu().clone()
                    for key, value in self.model.state_dict().items()
                }
            if elastic is not None and number >= self.agreement.next:
                self._heed(self.ask())
            return
        every = settings.save_every
        due = improved or (measured if every is None else number % every == 0)
        due = due or number == self.num_epochs or self.stop_reason is not None
        decision = None
        if number >= self.agreement.next:
            decision = self.ask()
            due = due or decision.save or bool(decision.signal)
        if due:
            self.save(values, improved)
        if decision is not None:
            self._heed(decision)

    def _heed(self, decision: Decision) -> None:
        self.signal = decision.signal
        if decision.changed and not decision.signal and self.elastic is not None:
            self.elastic.take_in()

    # ------------------------------------------------------------------ what is best

    def _choose_valid_loader(self, evaluated: list[str]) -> str:
        chosen, metric = self.settings.valid_loader, self.settings.main_metric
        if chosen is None:
            chosen = "valid" if "valid" in evaluated else evaluated[0] if evaluated else "train"
        if chosen not in (*evaluated, "train"):
            raise UserError(
                f"valid_loader={chosen!r} is not among the loaders; given are: "
                f"{', '.join([*evaluated, 'train'])}"
            )
        if chosen == "train" and metric != "loss":
            raise UserError(
                f"main_metric={metric!r}: of the clients' training only the loss is known; write "
                "main_metric='loss', or pass a loader 'valid' that is evaluated"
            )
        return chosen

    def _main(self, values: Values) -> float:
        return values.get(self.valid_loader, {}).get(self.settings.main_metric, math.nan)

    def _update_best(self, values: Values) -> bool:
        value = self._main(values)
        better = self.settings.is_better(value, self.best)
        if better:
            self.best, self.best_round = value, self.epoch
        return better

    def _load_best(self) -> None:
        if self.best is None:
            return
        if self.checkpoints.folder is not None:
            self.checkpoints.wait()
            self._best_state = checkpoint.load(self.checkpoints.folder / "best")["model"]
        if self._best_state is not None:
            self.model.load_state_dict(self._best_state)
            self.reporter.line(f"loaded the weights of the best round, {self.best_round}")

    # ------------------------------------------------------------------ small things

    def _set_options(self) -> None:
        """Let the clients' optimizers have what the schedule has made of the optimizer's
        options."""
        if self.schedule.scheduler is None:
            return
        for options, group in zip(
            self.rounds.work.local.optimizer.options, self.optimizer.param_groups, strict=True
        ):
            options.update({key: group[key] for key in options if key in group})

    def announce(self, note: str) -> None:
        rounds, world = self.rounds, self.world
        where = (
            f"{world.world_size} worker{'s' if world.world_size > 1 else ''} on {world.device.type}"
        )
        self.reporter.line(
            f"allhands: federated, {rounds.algorithm.name}, {where}; {rounds.per_round:,} of "
            f"{len(rounds.clients):,} clients a round, {rounds.rounds} rounds; "
            f"{len(rounds.clients.indices):,} samples; seed {self.settings.seed}"
        )
        if self.schedule.scheduler is not None:
            self.reporter.line(f"{type(self.schedule.scheduler).__name__} steps once a round")
        if self.elastic is not None and (why := self.elastic.refused()):
            self.reporter.line(ends_with_a_worker(why))
        if note:
            self.reporter.line(note)

    def _report(self, values: Values, rates: list[float], improved: bool) -> None:
        place, seconds = f"{self.epoch}/{self.num_epochs}", self.history["seconds"][-1]
        report_epoch(self.reporter, "round", place, values, rates[0], seconds, improved)
