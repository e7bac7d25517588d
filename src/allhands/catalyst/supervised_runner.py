"""`SupervisedRunner` with Catalyst's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import allhands.runner
from allhands.catalyst.arguments import train_arguments
from allhands.catalyst.batch_callbacks import BatchPart, MetricCallback, completed
from allhands.catalyst.batch_runner import BatchRunner, models_in
from allhands.catalyst.batch_training import BatchTraining, HookedSupervisedTraining
from allhands.catalyst.callback import BATCH_HOOKS, HOOKS, has_hook
from allhands.catalyst.engines import device_with
from allhands.catalyst.own_runner import evaluate_loader
from allhands.catalyst.translation import translate
from allhands.errors import UserError
from allhands.loop.reporter import Reporter
from allhands.report.history import History
from allhands.runner.callbacks import callback_list
from allhands.runner.hooks import check_runner
from allhands.runner.keys import Keys
from allhands.runner.metrics import named_metrics
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.train_settings import TrainSettings
from allhands.runner.training import Training
from allhands.step.modes import evaluation_mode
from allhands.world import World


class SupervisedRunner(BatchRunner, allhands.runner.SupervisedRunner):
    """`allhands.SupervisedRunner`, with the arguments that Catalyst's has.

    With hooks of batches and loaders, a ``handle_batch(self, batch)``, several outputs or several
    criteria, it computes batch by batch, as `Runner` does, with the strategies of that one.

    Args:
        model: default for the methods' `model`.
        input_key: see `allhands.SupervisedRunner`.
        output_key: what callbacks and `predict_loader` call the model's output; a list of names for
            a model that gives a tuple, None for one that gives a dict.
        target_key: the target in batches that are dicts; what callbacks call it.
        loss_key: what the loss is called.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        input_target_key: an older name of `target_key`.

    Raises:
        UserError: an argument cannot be honoured.
    """

    # Ours, (model, batch); a subclass may have Catalyst's, (batch).
    handle_batch = allhands.runner.SupervisedRunner.handle_batch  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module | None = None,
        engine: Any = None,
        input_key: Keys | None = None,
        output_key: Any = "logits",
        target_key: Keys = "targets",
        loss_key: str = "loss",
        *,
        device: str | None = None,
        input_target_key: Keys | None = None,
    ) -> None:
        allhands.runner.SupervisedRunner.__init__(
            self,
            model,
            device_with(engine, device),
            input_key,
            target_key if input_target_key is None else input_target_key,
        )
        self.output_key, self.loss_key = output_key, loss_key
        # The names that subclasses of Catalyst's use.
        self._input_key, self._target_key = self.input_key, self.target_key
        self._output_key, self._loss_key = output_key, loss_key
        self.given_engine = engine
        self.trained_with: Any = None
        self._by_batch = False
        self._forget()

    # ------------------------------------------------------------------ train

    def train(self, *, callbacks: Any = None, **given: Any) -> History:
        """Train; see `allhands.SupervisedRunner.train`, whose arguments can be given too.

        Args:
            callbacks: a list or a dict; those that are settings or metrics become arguments.
            given: Catalyst's ``valid_metric``, ``minimize_valid_metric``, ``initial_seed``,
                ``fp16``, ``ddp`` and ``cpu`` among them.

        Raises:
            UserError: an argument is not known, or cannot be honoured.
        """
        self._forget()
        members = callback_list(callbacks)
        several = any(
            isinstance(given.get(name), Mapping) for name in ("model", "criterion", "optimizer")
        )
        self._by_batch = several or self._needs_batches(members)
        if self._by_batch:
            metrics = named_metrics(given.pop("metrics", None))
            members = completed(members, self.loss_key)
            members += [MetricCallback(metrics=metrics)] if metrics else []
        settings, rest = train_arguments(self, members, given, self._by_batch)
        if self._by_batch:
            del settings["metrics"]
        self.trained_with = settings.get("criterion")
        return allhands.runner.SupervisedRunner.train(self, callbacks=rest or None, **settings)

    def _needs_batches(self, callbacks: list[Any]) -> bool:
        """Whether something is asked for that needs each batch."""
        own = any(getattr(type(self), hook) is not getattr(BatchRunner, hook) for hook in HOOKS)
        plain = isinstance(self.output_key, str) and self.loss_key == "loss"
        return (
            own
            or not plain
            or self._takes_batch_alone
            or any(
                one.needs_batches()
                if isinstance(one, BatchPart)
                else any(has_hook(one, hook) for hook in BATCH_HOOKS)
                for one in callbacks
            )
        )

    @property
    def _takes_batch_alone(self) -> bool:
        """Whether a subclass has Catalyst's ``handle_batch(self, batch)``."""
        return len(inspect.signature(self.handle_batch).parameters) == 1

    def _check(self) -> None:
        alone = self._takes_batch_alone
        own = {"handle_batch": ("self, batch", (None,))} if alone else {}
        own |= dict.fromkeys(HOOKS, ("self, runner", (None,)))
        check_runner(self, SupervisedRunner, own)

    def _settings(self, **given: Any) -> TrainSettings:
        if not self._by_batch:
            return allhands.runner.SupervisedRunner._settings(self, **given)
        self._check()
        return OwnTrainSettings.of(type(self).__name__, **given)

    def _training(self, settings: Any, world: World, reporter: Reporter) -> Training:
        kind = BatchTraining if self._by_batch else HookedSupervisedTraining
        return kind(self, settings, world, reporter)

    # ------------------------------------------------------------------ a batch

    def prepare(self) -> None:
        self.batch = self._named(self.batch) or self.batch

    def handle(self, batch: Any) -> None:
        if self._takes_batch_alone:
            self.handle_batch(batch)  # type: ignore[call-arg]
            return
        named = dict(batch) if isinstance(batch, Mapping) else {}
        output, target = self.handle_batch(self.model, batch)
        named |= self._outputs(output)
        if isinstance(target, Mapping):
            named |= target
        elif isinstance(self.target_key, str):
            named[self.target_key] = target
        self.batch = named

    def _named(self, batch: Any) -> dict[str, Any]:
        """The members of a batch by the keys, as far as these say."""
        if isinstance(batch, Mapping):
            return dict(batch)
        keys = (self.input_key, self.target_key)
        named = all(isinstance(key, str) for key in keys)
        if named and isinstance(batch, (tuple, list)) and len(batch) == 2:
            return {str(key): one for key, one in zip(keys, batch, strict=True)}
        return {}

    def _outputs(self, output: Any) -> dict[str, Any]:
        keys = self.output_key
        if isinstance(keys, str):
            return {keys: output}
        if keys is None and isinstance(output, Mapping):
            return dict(output)
        if isinstance(keys, (list, tuple)):
            members = [output[key] for key in keys] if isinstance(output, Mapping) else output
            if isinstance(members, (list, tuple)) and len(members) == len(keys):
                return dict(zip(keys, members, strict=True))
        raise UserError(
            f"SupervisedRunner(output_key={keys!r}), and the model's output is "
            f"{type(output).__name__}; write one name, a list with one for each member of a tuple, "
            "or None for a model that gives a dict"
        )

    # ------------------------------------------------------------------ evaluate, predict

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
        members = callback_list(callbacks)
        chosen = criterion if criterion is not None else self.trained_with
        if self._by_batch or self._needs_batches(members):
            self.criterion = chosen
            if chosen is not None:
                members = completed(members, self.loss_key)
            return evaluate_loader(self, loader, members, model, seed)
        settings, rest = translate(self, members, {})
        metrics = settings.pop("metrics")
        if rest or settings:
            raise UserError("evaluate_loader takes callbacks that measure, and no others")
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
        if (
            self._takes_batch_alone
            or type(self).predict_batch is not SupervisedRunner.predict_batch
        ):
            yield from BatchRunner.predict_loader(self, loader=loader, model=model, seed=seed)
            return
        outputs = self.predict(model=model, loader=loader, seed=seed)
        if not isinstance(outputs, torch.Tensor):
            yield self._outputs(outputs)
            return
        for rows in outputs.split(loader.batch_size or 1):
            yield self._outputs(rows)

    def predict_batch(self, batch: Any) -> dict[str, Any]:
        """The model's output for one batch of a loader, in evaluation mode and without
        gradients."""
        model = self._model(None)
        with torch.no_grad(), evaluation_mode(models_in(model)):
            output, _ = allhands.runner.SupervisedRunner.handle_batch(self, model, batch)
        return self._outputs(output)
