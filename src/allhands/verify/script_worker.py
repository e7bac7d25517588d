"""A worker that runs the user's script for a comparison."""

from __future__ import annotations

import os
import threading
from typing import Any

import allhands
from allhands.data import derive_seed, seed_everything
from allhands.errors import UserError, WorldError
from allhands.launch import ship, worker
from allhands.loop import workers
from allhands.loop.model_groups import OwnModels
from allhands.loop.settings import LoopSettings
from allhands.runner import Runner, SupervisedRunner
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.own_training import OwnTraining
from allhands.strategies import Strategy
from allhands.verify.recorded_loop import Enough, RecordedLoop, RecordedSteps, ScriptRun, call_here
from allhands.verify.runs import Variation
from allhands.world import current_world, finalize


def record_runners(run: ScriptRun) -> None:
    """Let the runners of this process train as the run wants, recorded."""
    own_settings = Runner._settings

    class RecordedRunnerSteps(RecordedSteps):
        def __init__(self, settings: LoopSettings, models: OwnModels, *rest: Any) -> None:
            super().__init__(settings, models, *rest)
            self.record()

    def settings(runner: Runner, **given: Any) -> OwnTrainSettings:
        model = given["model"]
        models = dict(model) if isinstance(model, dict) else {"model": model}
        run.adapt(given, given["data"], models)
        given |= {"data": run.data_of(given["data"]), "profile": None, "verbose": False}
        found = own_settings(runner, **given)
        assert isinstance(found, OwnTrainSettings)
        return found

    def plan(runner: Runner, distributed: bool | str | Strategy, count: int | None) -> workers.Plan:
        return workers.plan(run.strategy_for(distributed), None, runner.device)

    # In this process, for good.
    for name, function in (("_settings", settings), ("_plan", plan)):
        setattr(Runner, name, function)
    OwnTraining.steps_kind = RecordedRunnerSteps
    SupervisedRunner.train = _refuse  # type: ignore[method-assign]


def _refuse(*_: Any, **__: Any) -> Any:
    raise UserError(
        "the script trains with SupervisedRunner, whose steps are not the script's own; call "
        "allhands.verify(model=…, …) with the arguments of train(), or verify its run file: "
        "allhands verify -C run.yml"
    )


def run(
    script: str,
    args: list[str],
    timeout: float,
    options: dict[str, Any],
    reference: str | None = None,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Run a script with recorded loops, in every worker of a world.

    Args:
        script, args: as for Python.
        timeout: seconds for one step, after which the worker fails.
        options: for `ScriptRun`.
        reference: the file of the reference's steps.
        quiet: drop what is written to stderr; what is printed is always dropped.

    Returns:
        On rank 0, the trace, or what was found out about the loop, as plain data.
    """
    rank = int(os.environ["RANK"])
    _drop(1)
    if quiet:
        _drop(2)
    # A script without a seed is the same training on rank 0 and alone. Other ranks differ from it,
    # as processes without a seed do.
    seed_everything(derive_seed(0, "verify", rank))
    ran = ScriptRun(
        **options | {"variation": Variation(**options["variation"])},
        # The other ranks hold the same weights, or `apart` says so.
        reference=ship.load(reference) if reference and not rank else None,
        stepped=(patience := _Patience(timeout)).again,
    )
    RecordedSteps.run = ran
    record_runners(ran)
    allhands.Loop, allhands.spawn = RecordedLoop, call_here  # type: ignore[misc]
    patience.again()
    try:
        worker.run_script(script, args)
    except Enough:
        pass
    except WorldError as error:  # a runner says it of `Enough` as well
        if not ran.complete:
            if not ran.trace.steps:
                raise
            ran.trace.failure = str(error)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise UserError(
                f"{script} ended with sys.exit({leave.code!r}); verify needs the arguments with "
                "which it trains: allhands verify script.py -- --its-own options"
            ) from leave
    finally:
        patience.end()
        ran.calls.end()
    if not ran.loops and not ran.facts:
        raise UserError(
            f"{script} makes no allhands.Loop and trains with no allhands.Runner, so there is no "
            "step to compare. For a training with SupervisedRunner, call allhands.verify(model=…, "
            "…) or verify its run file: allhands verify -C run.yml"
        )
    if not ran.examines and not ran.trace.steps:
        raise UserError(
            f"{script} makes an allhands.Loop and takes no step with it; call loop.step in "
            "`for epoch in loop.epochs(…)` or `for step in loop.steps(…)`"
        )
    found = ran.facts or ran.end()
    if current_world() is not None and not ran.trace.failure:
        finalize()
    return None if rank else found


def _drop(number: int) -> None:
    """Write nothing to this descriptor any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


class _Patience:
    """Ends this process when nothing happens for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timer: threading.Timer | None = None

    def again(self) -> None:
        """Something has happened."""
        self.end()
        self._timer = threading.Timer(self.seconds, self._fail)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Nothing needs to happen any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _fail(self) -> None:
        worker.fail(
            f"no step within {self.seconds:g} s: the script hangs, or takes longer for a step; "
            "--timeout SECONDS waits longer"
        )
