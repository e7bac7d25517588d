"""A runner of the user's own in a run of a comparison."""

from __future__ import annotations

from typing import Any

from allhands.errors import UserError
from allhands.loop import workers
from allhands.loop.model_groups import OwnModels
from allhands.loop.settings import LoopSettings
from allhands.runner import Runner, SupervisedRunner
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.own_training import OwnTraining
from allhands.strategies import Strategy
from allhands.verify.recorded_loop import RecordedSteps, ScriptRun


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
