"""The runs of a script that trains with `allhands.Loop`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.checks import check_whole, is_number
from allhands.errors import AllhandsError, UserError
from allhands.launch import idle_agents, spawn
from allhands.launch.signals import leaves_on_sigterm
from allhands.loop.workers import plan
from allhands.report import require_matplotlib
from allhands.strategies import Single, Strategy
from allhands.verify import script_worker
from allhands.verify.compare import (
    compare,
    refuse_world_around,
    show,
    steps_that_fit,
    strategies_of,
)
from allhands.verify.noise import judge
from allhands.verify.probes import NoProbe, listed
from allhands.verify.report import Report
from allhands.verify.runs import CannotVary, Runs, Subject, Trace, Variation
from allhands.world.cores import cores

if TYPE_CHECKING:
    from allhands.verify.causes import Case

# Losses of one batch on different ranks are equal but for rounding.
_CLOSE = 1e-5
_PRELOAD = ("torch._dynamo", "rich.console", "allhands.verify.script_worker")


def verify_script(
    script: str,
    args: Sequence[str] = (),
    *,
    strategies: Sequence[str] | None = None,
    workers: Sequence[int] = (1, 2),
    steps: int = 20,
    timeout: float = 300.0,
    plot: str | Path | None = None,
) -> Report:
    """Run a script that trains with `allhands.Loop` alone and distributed, and compare every step
    of its optimizers; see `allhands.verify`.

    The script runs several times. Each run ends with `SystemExit` in the last step that is
    compared. Its loops write nothing and resume nothing, and what it prints is dropped.

    Args:
        script: the file.
        args: its arguments.
        strategies: names; None takes the script's own.
        workers: numbers of workers.
        steps: of each optimizer.
        timeout: seconds that a step may take.
        plot: a PNG to draw the differences into.

    Returns:
        The report, which is printed too. Steps are counted for each optimizer.

    Raises:
        UserError: the script makes no loop, or takes no step with it; an argument cannot be
            honoured.
        WorkerError: the script failed.
    """
    refuse_world_around()
    check_whole("steps", steps, unit="optimizer steps")
    if not is_number(timeout) or not timeout > 0:
        raise UserError(f"timeout={timeout!r}; it must be a positive number of seconds")
    if plot is not None:
        require_matplotlib()
    chosen = None if strategies is None else strategies_of(strategies)
    with leaves_on_sigterm(), idle_agents.kept(60.0):
        runs = ScriptRuns(script, args, chosen, max(workers), timeout)
        try:
            for strategy in runs.strategies:
                if isinstance(strategy, Single):
                    raise UserError(
                        "strategy 'single' is one process, so there is nothing to compare; write "
                        "--strategies ddp"
                    )
                for count in workers:
                    # Refuses now what it would refuse after the first runs.
                    plan(strategy, count, None)
            compared, notes = steps_that_fit(runs.nbytes, steps)
            report = compare(runs, runs.strategies, list(workers), compared)
        finally:
            runs.close()
    report.notes = notes + report.notes
    return show(report, plot)


class ScriptRuns(Runs):
    """Runs of the user's script, each in new processes.

    Args:
        script, args: what is run.
        strategies: that are compared; None takes the script's own.
        largest: number of workers.
        timeout: seconds for a step.
    """

    def __init__(
        self,
        script: str,
        args: Sequence[str],
        strategies: list[Strategy] | None,
        largest: int,
        timeout: float,
    ) -> None:
        super().__init__()
        self._call = script, list(args), timeout
        # One process forks the workers of worlds of any size.
        self._threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // largest)
        about = {"strategies": strategies or [], "largest": largest, "examines": True}
        facts = self._run(1, Variation(1), about)
        self.strategies = strategies or [pickle.loads(facts["strategy"])]
        self._exact, self._cuts, self.nbytes = facts["exact"], facts["cuts"], facts["bytes"]
        self.subject = Subject(**facts["subject"])
        self.probe = NoProbe()

    def cut(self, shares: int) -> int:
        return int(self._cuts[shares])

    def exact(self, strategy: Strategy) -> bool:
        return bool(self._exact[self.strategies.index(strategy)])

    def alone(
        self, variation: Variation, reference: str | None = None, keep: bool = False
    ) -> Trace:
        try:
            found = self._run(1, variation, {"keep": keep}, reference, quiet=not keep)
        except AllhandsError as error:
            if variation == Variation(variation.steps, alone_for=variation.alone_for):
                raise
            raise CannotVary(_reason(error)) from error
        return Trace(**found)

    def distributed(
        self, strategy: Strategy, workers: int, wanted: list[tuple[Variation, str]]
    ) -> list[Trace]:
        return [
            Trace(**self._run(workers, variation, {"strategy": strategy}, reference))
            for variation, reference in wanted
        ]

    def _run(
        self,
        workers: int,
        variation: Variation,
        options: dict[str, Any],
        reference: str | None = None,
        quiet: bool = False,
    ) -> dict[str, Any]:
        strategy = options.get("strategy")
        found: dict[str, Any] = spawn(
            script_worker.run,
            (*self._call, options | {"variation": asdict(variation)}, reference, quiet),
            workers=workers,
            servers=strategy.servers_to_start() if strategy is not None else 0,
            threads=self._threads,
            preload=_PRELOAD,
        )[0]
        return found

    # ------------------------------------------------------------------ causes

    def causes(self, case: Case) -> list[str]:
        said = []
        trace = case.trace
        if trace.collectives:
            said.append(
                f"collective: the loop calls {listed(trace.collectives)}. loop.step exchanges "
                "gradients itself, and weighs each rank by its samples; a loss or gradient that "
                "another collective has changed is not that of one process. Leave it out; "
                "loop.gather gives the rows of all ranks to a loss, and loop.mean a mean to print"
            )
        if trace.draws and self._draws_matter(case):
            said.append(
                f"random numbers: the loop calls {listed(trace.draws)}, which draws from a "
                "generator of the process, and each rank has another stream. Draw with loop.randn "
                "or loop.rand in the step function, which give a sample the same numbers at any "
                "number of workers; or give the call a generator=, seeded alike everywhere, and "
                "take this rank's rows"
            )
        for function, values in self._by_rank(case).items() if case.workers > 1 else ():
            if max(values) - min(values) > _CLOSE * max(map(abs, values)):
                of = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
                said.append(
                    f"rank: for one and the same batch, {function} gives {of}. It depends on the "
                    "rank: by a branch (loop.main, RANK), or by something that each rank has made "
                    "for itself"
                )
        if self.subject.own_batches and case.finding.what == "number of samples":
            said.append(
                "batches of your own: the rows of all ranks together must be those that one "
                "process makes. Make all of them on every rank, from one seed, and take "
                "rows[first:last] of first, last = loop.share(len(rows))"
            )
        return said

    def _draws_matter(self, case: Case) -> bool:
        """One process with other random numbers differs too, dropout left out."""
        shares = case.strategy.shares(case.workers)
        plain = Variation(case.number, alone_for=shares, frozen="dropout")
        try:
            path, reference = self.reference(plain)
        except AllhandsError:
            return False
        try:
            other = self.alone(replace(plain, stream=1), path)
            return judge(other, reference, case.noise, case.exact) is not None
        except AllhandsError:
            return False
        finally:
            self.forget(path)

    def _by_rank(self, case: Case) -> dict[str, list[float]]:
        variation = Variation(case.number, by_rank=True)
        try:
            (trace,) = self.distributed(case.strategy, case.workers, [(variation, "")])
        except AllhandsError:
            return {}
        return trace.by_rank


def _reason(error: AllhandsError) -> str:
    """What an error says in one line."""
    text = str(error).splitlines()[0]
    return text.partition("failed first: raised ")[2] or text
