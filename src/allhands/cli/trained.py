"""What a run has trained: measured, and applied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

from allhands.cli.named import raise_all
from allhands.cli.prediction_files import Predictions
from allhands.cli.run_data import entry_of, load_datasets
from allhands.cli.run_objects import (
    criterion_of,
    datasets_of,
    is_of_classes,
    metrics_of,
    model_of,
    problems,
    runner_of,
)
from allhands.config import RunFile
from allhands.errors import UserError, did_you_mean
from allhands.loop.checkpoint import load, resolve
from allhands.runner import SupervisedRunner


def checkpoint_of(given: Path, folder: Path) -> Path:
    """The checkpoint that is meant: `given`, or of a logdir the best one, else the newest."""
    best = folder / "checkpoints" / "best"
    is_logdir = given.expanduser().absolute() == folder.absolute()
    return resolve(best if is_logdir and best.exists() else given)


def evaluate(
    run_file: RunFile, checkpoint: Path, loaders: list[str] | None, workers: int
) -> dict[str, dict[str, float]]:
    """The loss and the metrics of the loaders, of a checkpoint's weights.

    Raises:
        UserError: names, options, data or the checkpoint cannot be used.
    """
    model, runner = _model(run_file, checkpoint)
    datasets = {**datasets_of(run_file), "get_datasets_fn": load_some, "loaders": loaders}
    found: dict[str, dict[str, float]] = runner.evaluate(
        model=model,
        criterion=criterion_of(run_file),
        datasets=datasets,
        metrics=metrics_of(run_file),
        distributed=workers > 1,
        workers=workers if workers > 1 else None,
        precision=run_file.config.precision,
        seed=run_file.config.seed,
    )
    return found


def predict(run_file: RunFile, checkpoint: Path, loader: str, workers: int) -> Predictions:
    """The output of a checkpoint's model for every sample of a loader, and the targets where they
    are known without reading the samples again.

    Raises:
        UserError: names, options, data or the checkpoint cannot be used.
    """
    model, runner = _model(run_file, checkpoint)
    data = run_file.config.data
    (dataset,) = load_some(data.name, datasets_of(run_file)["options"], [loader]).values()
    output = runner.predict(
        model=model,
        dataset=dataset,
        batch_size=data.batch_size,
        distributed=workers > 1,
        workers=workers if workers > 1 else None,
        precision=run_file.config.precision,
        seed=run_file.config.seed,
    )
    target = None
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        last = dataset.tensors[-1]
        target = last.numpy() if last.dim() == 1 else None
    return Predictions.of(output, target, is_of_classes(run_file))


def load_some(name: str, options: Mapping[str, Any], loaders: list[str] | None) -> dict[str, Any]:
    """The data sets of some loaders; None: of those that are not trained on."""
    made = load_datasets(name, options)
    if loaders is None:
        loaders = [key for key in made if not key.startswith("train")] or list(made)
    for wanted in loaders:
        if wanted not in made:
            raise UserError(
                f"there is no loader '{wanted}'; there are {', '.join(made)}"
                f"{did_you_mean(wanted, made, '')}"
            )
    return {key: made[key] for key in loaders}


def _model(run_file: RunFile, checkpoint: Path) -> tuple[nn.Module, SupervisedRunner]:
    raise_all(problems(run_file, files=True))
    runner = runner_of(run_file)
    if run_file.config.loop is not None or not isinstance(runner, SupervisedRunner):
        key = "loop" if run_file.config.loop is not None else "runner"
        raise run_file.error(
            (key,), "what its steps measure and give is known to them alone; write a script"
        )
    model = model_of(run_file, entry_of(run_file))
    weights = load(checkpoint)["model"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint} does not fit the model of the run file: {str(error).strip()}"
        ) from None
    return model, runner
