"""Where a training's numbers go beside its logdir: Weights & Biases, MLflow, or a class of one's
own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.errors import UserError, kind_of


class Logger:
    """Override what you need. Rank 0 alone calls it; with federated training, the server does.

    An error in it never ends a training: a line says it, and the training goes on without it.
    """

    def open(self, about: Mapping[str, Any], logdir: Path | None, resumed: bool) -> None:
        """The training begins.

        Args:
            about: settings, plain values by name.
            logdir: the training's folder; keep there what `resumed` needs.
            resumed: it goes on from a checkpoint.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers, such as ``{"valid/loss": 0.3}``, after `step` optimizer steps."""

    def picture(self, name: str, file: Path) -> None:
        """Take a picture as the training ends."""

    def close(self, failed: bool) -> None:
        """The training has ended, `failed` by an error."""


class WandbLogger(Logger):
    """Weights & Biases; ``pip install 'allhands[wandb]'``. A resumed training continues its run.

    Args:
        project: of the run.
        name: of the run; None lets wandb choose one.
        mode: "online", "offline" (files in the logdir, for ``wandb sync``), or None for what the
            variable WANDB_MODE says.
        options: further arguments of ``wandb.init``.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: str | None = None,
        **options: Any,
    ) -> None:
        _check_installed("wandb", "wandb")
        self.options = {"project": project, "name": name, "mode": mode, **options}
        self._run: Any = None

    def open(self, about: Mapping[str, Any], logdir: Path | None, resumed: bool) -> None:
        import wandb

        run = _kept_run(logdir, "wandb", resumed)
        options = dict(self.options)
        if logdir is not None:
            options.setdefault("dir", str(logdir))
        if run is not None:
            options |= {"id": run, "resume": "allow"}
        self._run = wandb.init(config=dict(about), **options)
        _keep_run(logdir, "wandb", self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step}, step=step)

    def picture(self, name: str, file: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(file))})

    def close(self, failed: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(failed))


class MLflowLogger(Logger):
    """MLflow; ``pip install 'allhands[mlflow]'``. A resumed training continues its run.

    Args:
        experiment: name; made where there is none of it.
        uri: of the tracking server, or of a folder (``file:///data/mlruns``); None takes what
            MLflow itself is told (MLFLOW_TRACKING_URI).
        name: of the run; None lets MLflow choose one.

    Raises:
        UserError: MLflow is not installed.
    """

    def __init__(
        self, experiment: str = "allhands", uri: str | None = None, name: str | None = None
    ) -> None:
        _check_installed("mlflow", "mlflow")
        self.experiment, self.uri, self.name = experiment, uri, name
        self._client: Any = None
        self._run = ""

    def open(self, about: Mapping[str, Any], logdir: Path | None, resumed: bool) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self.uri)
        run = _kept_run(logdir, "mlflow", resumed)
        if run is None:
            found = client.get_experiment_by_name(self.experiment)
            number = (
                client.create_experiment(self.experiment) if found is None else found.experiment_id
            )
            run = client.create_run(number, run_name=self.name).info.run_id
            client.log_batch(run, params=[Param(key, str(value)) for key, value in about.items()])
        else:
            client.update_run(run, status="RUNNING")
        self._run = run
        _keep_run(logdir, "mlflow", run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run, metrics=[Metric(key, value, now, step) for key, value in values.items()]
        )

    def picture(self, name: str, file: Path) -> None:
        self._client.log_artifact(self._run, str(file))

    def close(self, failed: bool) -> None:
        if self._run:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
            self._run = ""


class Trackers:
    """The loggers of a training, of which none can end it.

    Args:
        loggers: to be called.
        about: settings, for them.
        say: prints a line.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        about: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._loggers, self._about, self._say = list(loggers), about or {}, say

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def open(self, logdir: Path | None, resumed: bool) -> None:
        """The training begins, or goes on from a checkpoint."""
        self.call("open", self._about, logdir, resumed)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of all of them; those that fail are left out from then on."""
        for logger in list(self._loggers):
            try:
                getattr(logger, method)(*args)
            except Exception as error:
                self._loggers.remove(logger)
                self._say(
                    f"note: {type(logger).__name__} failed and gets no more numbers, which are in "
                    f"metrics.csv where there is a logdir: {type(error).__name__}: {error}"
                )


def logger_list(given: Any) -> list[Logger]:
    """Loggers as a list, from a list, one, or None."""
    loggers = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for one in loggers:
        if not isinstance(one, Logger):
            what = f"the class {one.__name__}" if isinstance(one, type) else kind_of(one)
            raise UserError(
                f"loggers holds {what}; each must be an allhands.Logger, such as "
                "allhands.WandbLogger(project='…') or allhands.MLflowLogger(). metrics.csv and "
                "TensorBoard need none: pass logdir=…"
            )
    return loggers


def _check_installed(module: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise UserError(f"{module} is not installed: pip install 'allhands[{extra}]'")


def _kept_run(logdir: Path | None, kind: str, resumed: bool) -> str | None:
    """The run that an earlier part of this training has made."""
    file = None if logdir is None else logdir / f"{kind}_run.json"
    if not resumed or file is None or not file.is_file():
        return None
    run: str = json.loads(file.read_text())["run"]
    return run


def _keep_run(logdir: Path | None, kind: str, run: str) -> None:
    if logdir is not None:
        (logdir / f"{kind}_run.json").write_text(json.dumps({"run": run}) + "\n")
