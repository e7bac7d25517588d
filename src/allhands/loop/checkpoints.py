"""Where checkpoints are, and which of them a training goes on from."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.comm import all_gather_text, calls
from allhands.errors import UserError
from allhands.loop import checkpoint
from allhands.loop.loggers import set_earlier_run_aside
from allhands.loop.position import Position
from allhands.world.jobs import jobs_around

# In the checkpoints folder: the Slurm job that has begun this training.
_JOB_FILE = "job"


class Checkpoints(ABC):
    """The checkpoints of one training. All ranks call every method together.

    Args:
        loop: the training, whose `settings`, `world`, `reporter`, `epoch` and `global_step` it
            asks for.
    """

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        logdir = self._agreed_logdir()
        self.folder = logdir / "checkpoints" if logdir is not None else None
        self._saver: checkpoint.Saver | None = None

    def _agreed_logdir(self) -> Path | None:
        """Rank 0's logdir: a script that puts the time into its name has another one on each
        rank."""
        loop = self.loop
        named = [
            Path(text) if text else None
            for text in all_gather_text(str(loop.settings.logdir or ""), loop.world)
        ]
        without = [rank for rank, path in enumerate(named) if path is None]
        if without and len(without) < len(named):
            raise UserError(
                f"logdir is None on rank {without[0]} and {next(filter(None, named))} on another; "
                "pass the same logdir on every rank, without `if rank == 0`: only rank 0 writes "
                "metrics, and checkpoints are written by all"
            )
        if len(set(named)) > 1:
            loop.reporter.line(f"the ranks have different logdirs; all use rank 0's, {named[0]}")
        return named[0]

    # ------------------------------------------------------------------ saving

    def open(self) -> None:
        """Get ready to save. `restore` comes first, since it may move an earlier run's folder
        aside."""
        if self.folder is not None:
            self._saver = checkpoint.Saver(self.folder, self.loop.world)

    def meet(self) -> None:
        """Agree on the folder anew, with other members of the world."""
        self._agreed_logdir()

    def abandon(self) -> None:
        """Stop saving, as some rank is gone; what is being written is left out."""
        if self._saver is not None:
            self._saver.abandon()
            self._saver = None

    def wait(self) -> None:
        """Until what was saved is whole on the disk."""
        if self._saver is not None:
            self._saver.wait()

    def close(self, failed: bool = False) -> None:
        """Wait, and end. After a failure the wait is short: other ranks may be gone."""
        if self._saver is not None:
            self._saver.close(5.0 if failed else None)
            self._saver = None

    @abstractmethod
    def save(
        self,
        position: Position | None,
        best: bool = False,
        metrics: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Path:
        """Save, at the end of an epoch (`position` is None) or within it."""

    @abstractmethod
    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Put the training where the checkpoint, whose state was read already, left off.

        Raises:
            UserError: it is of another training.
        """

    # ------------------------------------------------------------------ going on

    @property
    def reads_whole(self) -> bool:
        """Whether this rank needs all weights of a checkpoint; where it holds a part of the model,
        it reads that alone."""
        return True

    def restore(self) -> None:
        """Put the training where the checkpoint that was asked for left off.

        Rank 0 chooses the checkpoint, so that no rank goes on from another one, or from none.
        """
        loop, settings = self.loop, self.loop.settings
        resume = self._resume_of_restarted_job() or settings.resume
        if resume is None and settings.logdir is not None and loop.world.rank == 0:
            aside = set_earlier_run_aside(settings.logdir)
            if aside is not None:
                loop.reporter.line(
                    f"the logdir held an earlier run, now in {aside}; write resume='auto' to go on "
                    "with it"
                )
        self._mark()
        if resume is None:
            return
        calls.note("choosing a checkpoint")
        path, state, failed = None, None, ""
        if loop.world.rank == 0:
            try:
                path, state = self._find(resume)
            except UserError as error:
                failed = str(error)
        failed, name = json.loads(
            all_gather_text(json.dumps([failed, str(path or "")]), loop.world)[0]
        )
        if failed:
            raise UserError(failed)
        if not name:
            loop.reporter.line("resume='auto': no checkpoint in the logdir, starting anew")
            return
        self.load(Path(name), self._same_on_every_rank(Path(name), state))

    def _mark(self) -> None:
        """Note which jobs this training belongs to: started again, they go on with it."""
        jobs = jobs_around(os.environ)
        if jobs and self.folder is not None and self.loop.world.rank == 0:
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
        if self.loop.world.rank == 0:
            mark = self.folder / _JOB_FILE
            if mark.is_file() and checkpoint.found_in(self.folder):
                names = mark.read_text().splitlines()
            else:
                names = []
            told = next((job.told for job in jobs if job.name in names), "")
        told = all_gather_text(told, self.loop.world)[0]
        if not told:
            return None
        self.loop.reporter.line(
            f"{told}: going on with its own newest checkpoint, as with resume='auto'"
        )
        return "auto"

    def _find(self, resume: str) -> tuple[Path | None, dict[str, Any] | None]:
        reporter = self.loop.reporter
        if resume != "auto":
            path = checkpoint.resolve(Path(resume))
            state = checkpoint.load(path, self.reads_whole)
        else:
            assert self.folder is not None
            found = checkpoint.newest(self.folder, self.reads_whole)
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
                state = checkpoint.load(path, self.reads_whole)
            except UserError as error:
                said = str(error)
        for rank, text in enumerate(all_gather_text(said, self.loop.world)):
            if text:
                raise UserError(
                    f"rank 0 resumes from {path}, which rank {rank} cannot read: {text}. The "
                    "logdir must be on a file system that all ranks share"
                )
        assert state is not None
        return state
