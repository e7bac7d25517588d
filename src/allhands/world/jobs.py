"""The jobs around this process, and how often each of them was started again."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.world.layout import Environ, read_int
from allhands.world.slurm import job_of, restarts_of


@dataclass(frozen=True)
class JobAround:
    """A job that may be started again after a failure or a preemption.

    Attributes:
        name: the same each time, and no other job's.
        restarts: how many times it was started again; 0 the first time.
        told: what happened, for a message.
    """

    name: str
    restarts: int

    @property
    def told(self) -> str:
        kind, _, rest = self.name.partition(" ")
        if kind == "slurm":
            return f"job {rest} was requeued (restart {self.restarts})"
        return f"the workers were started again (attempt {self.restarts + 1})"


def jobs_around(environ: Environ) -> list[JobAround]:
    """The Slurm job, and the job of `allhands launch` or torchrun that restarts its workers; those
    that there are."""
    found = []
    job = job_of(environ)
    if job is not None:
        found.append(JobAround(f"slurm {job}", restarts_of(environ)))
    run = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    # torchrun's default name is the same for every run.
    if run and run != "none":
        found.append(
            JobAround(f"launch {run}", read_int(environ, "TORCHELASTIC_RESTART_COUNT") or 0)
        )
    return found
