"""What a training puts into a checkpoint, and how it goes on from one."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_text, calls
from allhands.data import derive_seed, seed_everything
from allhands.errors import UserError
from allhands.runner import checkpoint
from allhands.runner.checkpoint import tree
from allhands.runner.generators import generator_states, set_generator_states
from allhands.runner.loggers import set_earlier_run_aside
from allhands.runner.position import Position
from allhands.strategies import STRATEGIES
from allhands.strategies.kept import in_parts, of_this_rank
from allhands.world.jobs import jobs_around

if TYPE_CHECKING:
    from allhands.runner.training import Training

FORMAT = 2
# In the checkpoints folder: the Slurm job that has begun this training.
_JOB_FILE = "job"


class TrainingCheckpoints:
    """The checkpoints of one training. All ranks call every method together."""

    def __init__(self, training: Training) -> None:
        self.training = training
        logdir = self._agreed_logdir()
        self.folder = logdir / "checkpoints" if logdir is not None else None
        self._saver: checkpoint.Saver | None = None
        # This rank's part of a checkpoint from the middle of an epoch, until that epoch goes on.
        self._own: list[dict[str, torch.Tensor]] = []
        self._generators: dict[str, torch.Tensor] | None = None
        self._logged: list[str] = []

    def _agreed_logdir(self) -> Path | None:
        """Rank 0's logdir: a script that puts the time into its name has another one on each
        rank."""
        training = self.training
        named = [
            Path(text) if text else None
            for text in all_gather_text(str(training.settings.logdir or ""), training.world)
        ]
        without = [rank for rank, path in enumerate(named) if path is None]
        if without and len(without) < len(named):
            raise UserError(
                f"logdir is None on rank {without[0]} and {next(filter(None, named))} on another; "
                "pass the same logdir on every rank, without `if rank == 0`: only rank 0 writes "
                "metrics, and checkpoints are written by all"
            )
        if len(set(named)) > 1:
            training.reporter.line(
                f"the ranks have different logdirs; all use rank 0's, {named[0]}"
            )
        return named[0]

    # ------------------------------------------------------------------ saving

    def open(self) -> None:
        """Get ready to save. `restore` comes first, since it may move an earlier run's folder
        aside."""
        if self.folder is not None:
            self._saver = checkpoint.Saver(self.folder, self.training.world)

    def save(
        self,
        position: Position | None,
        best: bool = False,
        metrics: dict[str, dict[str, float]] | None = None,
    ) -> Path:
        """Save, at the end of an epoch (`position` is None) or within it."""
        training = self.training
        assert self._saver is not None
        calls.note(("saving a checkpoint after optimizer step", training.step))
        state = self.state()
        own: dict[str, torch.Tensor] = {}
        within = position is not None
        # Only rank 0 draws from the user's samplers, so what they need is its own.
        passes = training.passes
        samplers, state["feeds"] = tree.split(
            {
                name: feed.state_dict(within or (passes is not None and passes.is_within(name)))
                for name, feed in training.feeds.items()
            }
        )
        if training.world.rank == 0:
            own |= {f"feeds/{key}": value for key, value in samplers.items()}
        own |= {
            f"strategy/{key}": value.clone()
            for key, value in training.settings.strategy.own_tensors().items()
        }
        state["position"] = position.to_dict() if position is not None else None
        summary = {
            "epoch": training.epoch + within,
            "step": training.step,
            "world_size": training.world.world_size,
            "metrics": metrics or {},
        }
        if position is None:  # an epoch begins with new generators, equal buffers and empty metrics
            return self._saver.save(state, own, summary, None, best)
        own |= {f"generators/{key}": value for key, value in generator_states().items()}
        if training.measuring is not None:
            own |= {f"metrics/{key}": value for key, value in training.measuring.partial().items()}
            own |= {f"logged/{name}": value for name, value in training.logged.partial().items()}
        # On another number of ranks, the training goes on from what evaluation would see; on this
        # one, from `own`.
        with training.settings.strategy.buffers_made_equal(training.model) as buffers:
            own |= {f"buffers/{name}": value for name, value in buffers.items()}
            return self._saver.save(state, own, summary, training.step, best)

    def wait(self) -> None:
        """Until what was saved is whole on the disk."""
        if self._saver is not None:
            self._saver.wait()

    def close(self, failed: bool = False) -> None:
        """Wait, and end. After a failure the wait is short: other ranks may be gone."""
        if self._saver is not None:
            self._saver.close(5.0 if failed else None)
            self._saver = None

    def state(self) -> dict[str, Any]:
        """What all ranks hold alike."""
        training = self.training
        training.settings.strategy.collect()
        return {
            "format": FORMAT,
            "model": training.settings.strategy.model_state(training.model),
            "optimizer": training.settings.strategy.optimizer_state(training.optimizer),
            "scheduler": training.schedule.state_dict(),
            "scaler": training.precision.scaler.state_dict()
            if training.precision.scaler is not None
            else None,
            "epoch": training.epoch,
            "step": training.step,
            "best": training.best,
            "best_epoch": training.best_epoch,
            "history": copy.deepcopy(training.history),
            "callbacks": self._callback_states(),
            "strategy": {training.settings.strategy.name: training.settings.strategy.state_dict()},
            "passes": training.passes.places if training.passes is not None else None,
            "seed": training.settings.seed,
            "world_size": training.world.world_size,
            "layout": training.settings.strategy.layout(training.world),
        }

    def _callback_states(self) -> list[dict[str, Any]]:
        states = [callback.state_dict() for callback in self.training.settings.callbacks]
        parts = self.training.settings.strategy.held_parts()
        return states if parts is None else in_parts(states, parts, self.training.world)

    # ------------------------------------------------------------------ going on

    @property
    def _reads_whole(self) -> bool:
        """Whether this rank needs all weights of a checkpoint; where it holds a part of the model,
        it reads that alone."""
        return not self.training.settings.strategy.takes_meta

    def load_weights(self, path: Path) -> None:
        """Take the model's weights from a checkpoint, and leave all else."""
        training, path = self.training, checkpoint.resolve(path)
        state = checkpoint.load(path, self._reads_whole)
        with checkpoint.reader(path) as read:
            training.settings.strategy.load_model_state(training.model, state["model"], read)

    def restore(self) -> None:
        """Put the training where the checkpoint that was asked for left off.

        Rank 0 chooses the checkpoint, so that no rank goes on from another one, or from none.
        """
        training, settings = self.training, self.training.settings
        resume = self._resume_of_restarted_job() or settings.resume
        if resume is None and settings.logdir is not None and training.world.rank == 0:
            aside = set_earlier_run_aside(settings.logdir)
            if aside is not None:
                training.reporter.line(
                    f"the logdir held an earlier run, now in {aside}; write resume='auto' to go on "
                    "with it"
                )
        self._mark()
        if resume is None:
            return
        calls.note("choosing a checkpoint")
        path, state, failed = None, None, ""
        if training.world.rank == 0:
            try:
                path, state = self._find(resume)
            except UserError as error:
                failed = str(error)
        failed, name = json.loads(
            all_gather_text(json.dumps([failed, str(path or "")]), training.world)[0]
        )
        if failed:
            raise UserError(failed)
        if not name:
            training.reporter.line("resume='auto': no checkpoint in the logdir, starting anew")
            return
        self._load(Path(name), self._same_on_every_rank(Path(name), state))

    def _mark(self) -> None:
        """Note which jobs this training belongs to: started again, they go on with it."""
        jobs = jobs_around(os.environ)
        if jobs and self.folder is not None and self.training.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _JOB_FILE).write_text("".join(f"{job.name}\n" for job in jobs))

    def _resume_of_restarted_job(self) -> str | None:
        """ "auto" in a job that was started again, when the checkpoints in the logdir are that
        job's own; else None.

        They are newer than a checkpoint that the first start was told to resume from.
        """
        jobs = [job for job in jobs_around(os.environ) if job.restarts]
        if not jobs or self.folder is None:
            return None
        told = ""
        if self.training.world.rank == 0:
            mark = self.folder / _JOB_FILE
            names = (
                mark.read_text().splitlines()
                if mark.is_file() and checkpoint.found_in(self.folder)
                else []
            )
            told = next((job.told for job in jobs if job.name in names), "")
        told = all_gather_text(told, self.training.world)[0]
        if not told:
            return None
        self.training.reporter.line(
            f"{told}: going on with its own newest checkpoint, as with resume='auto'"
        )
        return "auto"

    def _find(self, resume: str) -> tuple[Path | None, dict[str, Any] | None]:
        reporter = self.training.reporter
        if resume != "auto":
            path = checkpoint.resolve(Path(resume))
            state = checkpoint.load(path, self._reads_whole)
        else:
            assert self.folder is not None
            found = checkpoint.newest(self.folder, self._reads_whole)
            if found is None:
                return None, None
            path, state, passed_over = found
            for text in passed_over:
                reporter.line(f"passed over: {text}")
        reporter.line(f"resuming from {path}")
        return path, state

    def _same_on_every_rank(self, path: Path, state: dict[str, Any] | None) -> dict[str, Any]:
        said = ""
        if state is None:
            try:
                state = checkpoint.load(path, self._reads_whole)
            except UserError as error:
                said = str(error)
        for rank, text in enumerate(all_gather_text(said, self.training.world)):
            if text:
                raise UserError(
                    f"rank 0 resumes from {path}, which rank {rank} cannot read: {text}. The "
                    "logdir must be on a file system that all ranks share"
                )
        assert state is not None
        return state

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        training, settings = self.training, self.training.settings
        if "rounds" in state:
            raise UserError(
                f"resume: {path} is of a federated training; go on with it by "
                "distributed=Federated(…)"
            )
        if state.get("format") != FORMAT:
            raise UserError(
                f"resume: {path} was written by another version of allhands (format "
                f"{state.get('format')})"
            )
        if len(state["callbacks"]) != len(settings.callbacks):
            raise UserError(
                f"resume: the checkpoint was written with {len(state['callbacks'])} callback(s) "
                "and this run has "
                f"{len(settings.callbacks)}; pass the same callbacks in the same order"
            )
        try:
            with checkpoint.reader(path) as read:
                settings.strategy.load_model_state(training.model, state["model"], read)
                settings.strategy.load_optimizer_state(training.optimizer, state["optimizer"], read)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"resume: the checkpoint is of another model or optimizer: {error}"
            ) from None
        training.schedule.load_state_dict(state["scheduler"])
        if training.precision.scaler is not None and state["scaler"] is not None:
            training.precision.scaler.load_state_dict(state["scaler"])
        states, parts = state["callbacks"], settings.strategy.held_parts()
        if parts is not None:
            states = of_this_rank(states, parts, training.model)
        for callback, callback_state in zip(settings.callbacks, states, strict=True):
            callback.load_state_dict(callback_state)
        training.epoch, training.step = state["epoch"], state["step"]
        training.best, training.best_epoch = state["best"], state["best_epoch"]
        training.history = state["history"]
        if state["seed"] != settings.seed:
            training.reporter.line(
                f"note: the checkpoint was made with seed={state['seed']}, this run goes on with "
                f"{settings.seed}"
            )
        self._load_passes(state)
        self._load_own(path, state)

    def _load_passes(self, state: dict[str, Any]) -> None:
        passes, written = self.training.passes, state.get("passes")
        if passes is None:
            if written and any(samples for _, samples in written.values()):
                raise UserError(
                    "resume: the checkpoint was written with steps_per_epoch=…, in the middle of a "
                    "pass over the data; pass steps_per_epoch here too"
                )
        elif written is not None:
            passes.places = {name: list(place) for name, place in written.items()}
        elif state["position"] is not None:
            raise UserError(
                "resume: the checkpoint was written in the middle of an epoch without "
                "steps_per_epoch; leave steps_per_epoch out"
            )
        else:
            passes.places = {feed.name: [state["epoch"], 0] for feed in self.training.trained}

    def _load_own(self, path: Path, state: dict[str, Any]) -> None:
        """What one rank alone had: the user's samplers, generators, buffers that differ between
        ranks, unfinished metrics."""
        training, world = self.training, self.training.world
        first = checkpoint.load_own(path, 0)
        feeds = tree.join(state["feeds"], _under(first, "feeds/"))
        for name, feed in training.feeds.items():
            if name in feeds:
                feed.load_state_dict(feeds[name])
        before, strategy = state["world_size"], training.settings.strategy
        alike = before == world.world_size and state.get("layout", "") == strategy.layout(world)
        if before == world.world_size or strategy.resumes_anywhere:
            strategy.load_state_dict(state["strategy"].get(strategy.name, {}))
        self._load_strategys_own(path, state, first)
        if state["position"] is None:
            return
        self._logged = list(_under(first, "logged/"))
        training.position = position = Position(**state["position"])
        unknown = [name for name in position.done if name not in training.feeds]
        if unknown:
            raise UserError(
                f"resume: the checkpoint was written with a loader '{unknown[0]}', which this run "
                "does not have"
            )
        if alike:
            own = first if world.rank == 0 else checkpoint.load_own(path, world.rank)
            self._own = [own]
            self._generators = _under(own, "generators/")
            values = _under(own, "buffers/")
            for name, buffer in training.model.named_buffers():
                buffer.copy_(values[name])
            return
        laid_out = f" ({state['layout']})" if state.get("layout") else ""
        training.reporter.line(
            f"the checkpoint was written by {before} worker{'s' if before > 1 else ''}{laid_out}, "
            "and "
            f"{world.world_size} go on: with the same samples in the same order; dropout draws anew"
        )
        # Sums over ranks stay what they are when one rank holds all of them.
        if world.rank == all_gather_text("counts" if strategy.counts(world) else "", world).index(
            "counts"
        ):
            self._own = [first, *(checkpoint.load_own(path, rank) for rank in range(1, before))]

    def _load_strategys_own(
        self, path: Path, state: dict[str, Any], first: dict[str, torch.Tensor]
    ) -> None:
        """What the strategy had on each rank; on another number of ranks, rank 0 has the sum of
        all."""
        before = state["world_size"]
        world, strategy = self.training.world, self.training.settings.strategy
        if not _under(first, "strategy/"):
            return
        kept: dict[str, torch.Tensor] = {}
        if before == world.world_size:
            kept = _under(
                first if world.rank == 0 else checkpoint.load_own(path, world.rank), "strategy/"
            )
        elif world.rank == 0:
            kept = _under(first, "strategy/")
            for rank in range(1, before):
                for name, value in _under(checkpoint.load_own(path, rank), "strategy/").items():
                    kept[name] = kept[name] + value if name in kept else value
        (written,) = state["strategy"]
        if written == strategy.name and strategy.load_own_tensors(kept):
            return
        said = STRATEGIES[written].own_in_words.format(strategy=strategy.name)
        self.training.reporter.line(f"note: the checkpoint holds {said}")

    def continue_epoch(self, position: Position) -> None:
        """Set generators and metrics to where they were, just before the interrupted epoch goes
        on."""
        training = self.training
        settings = training.settings
        if self._generators is not None:
            set_generator_states(self._generators)
        else:
            seed_everything(
                derive_seed(
                    settings.seed, "resumed", training.epoch, training.stream, training.step
                )
            )
        if training.measuring is not None and position.steps:
            training.measuring.take_up([_under(own, "metrics/") for own in self._own])
            training.logged.take_up([_under(own, "logged/") for own in self._own], self._logged)
        self._own, self._generators = [], None


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
