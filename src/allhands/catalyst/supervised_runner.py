"""`SupervisedRunner` with Catalyst's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import allhands.runner
from allhands.catalyst.translation import only_default, translate
from allhands.errors import UserError, did_you_mean
from allhands.loop.history import History
from allhands.runner.keys import Keys
from allhands.step.modes import evaluation_mode

# Arguments of Catalyst's, and what they are here.
_RENAMED = {
    "valid_metric": "main_metric",
    "minimize_valid_metric": "minimize_metric",
    "initial_seed": "seed",
}
_WITHOUT_EFFECT = ("timeit", "hparams")
_INSTEAD = {
    "loggers": "logdir=…, which writes metrics.csv and TensorBoard files",
    "engine": "SupervisedRunner(device=…) and train(distributed=…)",
    "stage_kwargs": "the arguments of train() by their names",
    "state_kwargs": "the arguments of train() by their names",
    "checkpoint_data": "a Callback with state_dict() and load_state_dict(state)",
}


class SupervisedRunner(allhands.runner.SupervisedRunner):
    """`allhands.SupervisedRunner`, with the arguments that Catalyst's has.

    Args:
        model: default for the methods' `model`.
        input_key: see `allhands.SupervisedRunner`.
        output_key: what callbacks and `predict_loader` call the model's output.
        target_key: the target in batches that are dicts; what callbacks call it.
        loss_key: "loss".
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        input_target_key: an older name of `target_key`.

    Raises:
        UserError: an argument cannot be honoured.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        engine: Any = None,
        input_key: Keys = "features",
        output_key: str = "logits",
        target_key: Keys = "targets",
        loss_key: str = "loss",
        *,
        device: str | None = None,
        input_target_key: Keys | None = None,
    ) -> None:
        if engine is not None:
            raise UserError(f"SupervisedRunner(engine=…): write {_INSTEAD['engine']}")
        only_default("SupervisedRunner", loss_key=(loss_key, "loss"))
        if not isinstance(output_key, str):
            raise UserError(
                f"SupervisedRunner(output_key={output_key!r}): write one name; a model that gives "
                "a dict or a tuple gives it to the criterion and the metrics as it is"
            )
        super().__init__(
            model, device, input_key, target_key if input_target_key is None else input_target_key
        )
        self.output_key = output_key
        self.trained_with: Any = None

    def train(
        self,
        *,
        callbacks: Any = None,
        fp16: bool | None = None,
        ddp: bool | None = None,
        cpu: bool = False,
        **given: Any,
    ) -> History:
        """Train; see `allhands.SupervisedRunner.train`, whose arguments can be given too.

        Args:
            callbacks: a list or a dict; those that are settings or metrics become arguments.
            fp16: ``precision="fp16"``.
            ddp: ``distributed=True``.
            cpu: train on the processor.
            given: Catalyst's ``valid_metric``, ``minimize_valid_metric`` and ``initial_seed`` among
                them.

        Raises:
            UserError: an argument is not known, or cannot be honoured.
        """
        for name in [name for name in given if name in _WITHOUT_EFFECT]:
            del given[name]
        for name, here in _RENAMED.items():
            if name in given and given.setdefault(here, given[name]) != given.pop(name):
                raise UserError(f"{name} and {here} are one argument; leave out one of them")
        for name, instead in _INSTEAD.items():
            if given.pop(name, None):
                raise UserError(f"train({name}=…): write {instead}")
        flags = {"fp16": (fp16, "precision", "fp16"), "ddp": (ddp, "distributed", True)}
        for name, (flag, here, value) in flags.items():
            if flag and given.setdefault(here, value) != value:
                raise UserError(f"{name}=True and {here}={given[here]!r}; leave out one of them")
        if cpu:
            self.device = "cpu"
        settings, rest = translate(self, callbacks, given)
        period = settings.pop("scheduler_period", None)
        if period is not None:
            if settings.get("scheduler") is None:
                raise UserError("SchedulerCallback(mode=…) needs train(scheduler=…)")
            settings["scheduler"] = settings["scheduler"], period
        _check_names(settings)
        self.trained_with = settings.get("criterion")
        return super().train(callbacks=rest or None, **settings)

    def evaluate_loader(
        self,
        loader: Any,
        callbacks: Any = None,
        model: nn.Module | None = None,
        seed: int = 42,
        verbose: bool = False,
        criterion: Any = None,
    ) -> dict[str, float]:
        """The loss and the metrics of a loader; the criterion is that of `train`, unless another
        one is given.

        Raises:
            UserError: there is no criterion, or a callback does not measure.
        """
        settings, rest = translate(self, callbacks, {})
        metrics = settings.pop("metrics")
        if rest or settings:
            raise UserError("evaluate_loader takes callbacks that measure, and no others")
        chosen = criterion if criterion is not None else self.trained_with
        if chosen is None:
            raise UserError("evaluate_loader before train() needs criterion=…")
        values = self.evaluate(
            model=model,
            criterion=chosen,
            loaders={"loader": loader},
            metrics=metrics,
            seed=seed,
            verbose=verbose,
        )
        return values["loader"]

    def predict_loader(
        self, *, loader: Any, model: nn.Module | None = None, seed: int = 42
    ) -> Iterator[dict[str, Any]]:
        """The model's outputs, batch by batch, in the data set's order: ``{output_key: …}``. The
        tensors are on the CPU.

        Raises:
            UserError: see `allhands.SupervisedRunner.predict`.
        """
        outputs = self.predict(model=model, loader=loader, seed=seed)
        if not isinstance(outputs, torch.Tensor):
            yield {self.output_key: outputs}
            return
        for rows in outputs.split(loader.batch_size or 1):
            yield {self.output_key: rows}

    def predict_batch(self, batch: Any) -> dict[str, Any]:
        """The model's output for one batch of a loader, in evaluation mode and without
        gradients."""
        model = self._model(None)
        with torch.no_grad(), evaluation_mode(model):
            output, _ = self.handle_batch(model, batch)
        return {self.output_key: output}


def _check_names(settings: dict[str, Any]) -> None:
    """Raise `UserError` for an argument that `train` does not have."""
    known = inspect.signature(allhands.runner.SupervisedRunner.train).parameters
    for name in settings:
        if name not in known:
            raise UserError(f"train has no argument {name!r}{did_you_mean(name, known)}")
