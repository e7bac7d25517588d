"""`Runner` with Catalyst's ``handle_batch(self, batch)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import allhands.runner
from allhands.catalyst.arguments import train_arguments
from allhands.catalyst.batch_callbacks import BatchPart, MetricCallback
from allhands.catalyst.batch_runner import BatchRunner, models_in
from allhands.catalyst.batch_training import BatchTraining
from allhands.catalyst.callback import HOOKS
from allhands.catalyst.engines import device_with
from allhands.catalyst.loader_means import LoaderMeans
from allhands.catalyst.step_engine import BatchEngine
from allhands.data import build_feeds, preserved_generators, seed_everything, to_device
from allhands.errors import UserError
from allhands.loop.logged import Logged
from allhands.loop.reporter import Reporter
from allhands.loop.settings import Data
from allhands.loop.step_function import Rows
from allhands.report.history import History
from allhands.runner.callbacks import callback_list
from allhands.runner.hooks import check_methods
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.standalone import on_device
from allhands.runner.training import Training
from allhands.step.modes import evaluation_mode
from allhands.world import World


def evaluate_by_batch(
    runner: BatchRunner, given: Any, world: World, reporter: Reporter, shipped: bool
) -> dict[str, float]:
    """The means of ``batch_metrics``, and what callbacks measure, over a loader's samples.

    Args:
        runner: computes.
        given: the model, or models by name; the data; callbacks; a seed.
    """
    model, data, callbacks, seed = given
    container = models_in(model)
    means = LoaderMeans(
        [one for one in callbacks if isinstance(one, MetricCallback)], world, trains=False
    )
    logged = Logged(world)
    runner.model, runner.callbacks = model, sorted(callbacks, key=lambda one: one.order)
    runner.evaluates_on(BatchEngine(world.device))
    with (
        preserved_generators(),
        on_device(container, world.device),
        evaluation_mode(container),
        torch.no_grad(),
    ):
        for callback in runner.callbacks:
            if isinstance(callback, BatchPart):
                callback.begin(runner)
        seed_everything(seed)
        (feed,) = build_feeds(data.sources(seed), world, seed, same_everywhere=shipped).values()
        means.start(feed.name)
        runner.begin_loader(feed.name, False, means)
        for batches, counts, total, _ in feed.epoch(0):
            for batch, count in zip(batches, counts, strict=True):
                runner.compute(Rows(to_device(batch, world.device), count, 0, total))
                for name, value in runner.batch_metrics.items():
                    logged.add(name, value, count)
        values = logged.means(everywhere=False) | means.of_callbacks()
        return runner.end_loader(values, world)


_FOREIGN = {
    "_handle_batch": "handle_batch(self, batch)",
    "get_loaders": "train(loaders=…)",
    "get_model": "train(model=…)",
    "get_criterion": "train(criterion=…)",
    "get_optimizer": "train(optimizer=…)",
    "get_scheduler": "train(scheduler=…)",
    "get_callbacks": "train(callbacks=…)",
    "get_engine": "Runner(device=…) and train(distributed=…)",
    "get_loggers": "train(logdir=…)",
}


class Runner(BatchRunner, allhands.runner.Runner):
    """Trains with a step of your own::

        class Own(dl.Runner):
            def handle_batch(self, batch):
                x, y = batch
                loss = F.cross_entropy(self.model(x), y)
                self.batch_metrics["loss"] = loss
                if self.is_train_loader:
                    self.engine.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    A loss is the mean over the samples of the batch. Where `handle_batch` sets ``self.batch``
    instead, `CriterionCallback`, `BackwardCallback` and `OptimizerCallback` take the step.

    Args:
        model: default for the methods' `model`; one, or a dict by name.
        engine: one of `dl.CPUEngine` and its kin: the device and arguments of `train`.
        device: ``"cpu"`` or ``"cuda"``; None takes a GPU where there is one.
    """

    #: Whether ``get_model`` and its kin are called.
    own_methods = False

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        engine: Any = None,
        *,
        device: str | None = None,
    ) -> None:
        allhands.runner.Runner.__init__(self, model, device_with(engine, device))
        self.given_engine = engine
        self._forget()

    def train(self, *, callbacks: Any = None, **given: Any) -> History:
        """Train; see `allhands.Runner.train`, whose arguments can be given too.

        Args:
            callbacks: a list or a dict.
            given: Catalyst's ``valid_metric``, ``minimize_valid_metric``, ``initial_seed``,
                ``fp16``, ``ddp`` and ``cpu`` among them.

        Raises:
            UserError: an argument is not known, or cannot be honoured.
        """
        self._forget()
        settings, rest = train_arguments(self, callback_list(callbacks), given, by_batch=True)
        settings.pop("metrics")
        model = settings.get("model", self.model)
        if isinstance(model, nn.ModuleDict):  # its models have optimizers of their own
            settings["model"] = dict(model.items())
        return allhands.runner.Runner.train(self, callbacks=rest or None, **settings)

    def evaluate_loader(
        self,
        loader: Any,
        callbacks: Any = None,
        model: Any = None,
        seed: int = 42,
        verbose: bool = False,
    ) -> dict[str, float]:
        """The means of ``batch_metrics`` over a loader's samples, and what callbacks measure.

        Args:
            loader: a DataLoader.
            callbacks: a list or a dict.
            model: in the place of the runner's.
            seed: of what is drawn meanwhile.
            verbose: without effect.
        """
        return evaluate_loader(self, loader, callback_list(callbacks), model, seed)

    def _settings(self, **given: Any) -> OwnTrainSettings:
        calls = dict.fromkeys(HOOKS, ("self, runner", (None,)))
        calls["handle_batch"] = ("self, batch", (None,))
        check_methods(self, Runner, calls, {} if self.own_methods else _FOREIGN)
        return OwnTrainSettings.of(type(self).__name__, **given)

    def _training(self, settings: Any, world: World, reporter: Reporter) -> Training:
        return BatchTraining(self, settings, world, reporter)


def evaluate_loader(
    runner: Any, loader: Any, callbacks: list[Any], model: Any, seed: int
) -> dict[str, float]:
    """See `Runner.evaluate_loader`."""
    chosen = runner.model if model is None else model
    if chosen is None:
        raise UserError("evaluate_loader before train() needs model=…")
    data = Data({"loader": loader}, None)
    data.check(seed)
    given = chosen, data, callbacks, seed
    values: dict[str, float] = runner._plan(False, None).run(evaluate_by_batch, runner, given)
    return values
