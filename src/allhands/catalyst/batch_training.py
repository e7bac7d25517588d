"""How Catalyst's runners train: with their hooks, and batch by batch where these are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from allhands.catalyst.batch_callbacks import BatchPart, MetricCallback
from allhands.catalyst.callback import EXPERIMENT_HOOKS, Callback
from allhands.catalyst.hand_steps import HandSteps
from allhands.catalyst.loader_means import LoaderMeans
from allhands.data import Feed
from allhands.errors import UserError
from allhands.loop.base_loop import BaseLoop
from allhands.runner.callbacks import call_hook, overridden
from allhands.runner.own_training import OwnTraining
from allhands.runner.supervised_training import SupervisedTraining
from allhands.runner.training import Training

if TYPE_CHECKING:
    from allhands.catalyst.batch_runner import BatchRunner


class HookedTraining(Training):
    """Calls Catalyst's hooks of an experiment and its epochs, with the runner."""

    runner: Any

    def _hooks(self, hook: str) -> None:
        own, runner = EXPERIMENT_HOOKS.get(hook), self.runner
        runner.epoch_step = self.epoch + (self.loop.position is not None)
        for callback in overridden(self.settings.callbacks, hook):
            if not (isinstance(callback, Callback) and hook in EXPERIMENT_HOOKS.values()):
                call_hook(callback, hook, self)
        if own is None:
            return
        if hook == "on_epoch_end":
            runner.epoch_metrics.update(
                {
                    name: {key: values[-1] for key, values in measured.items()}
                    for name, measured in self.history.items()
                    if isinstance(measured, Mapping)
                }
            )
        runner.event(own)
        if hook == "on_epoch_end" and runner.need_early_stop:
            runner.need_early_stop = False
            self.stop("need_early_stop was set")


class HookedSupervisedTraining(HookedTraining, SupervisedTraining):
    """A supervised training, with Catalyst's hooks of epochs."""

    def _make_loop(self, runner: Any) -> BaseLoop:
        self.runner = runner
        runner.callbacks = list(self.settings.callbacks)
        runner.tell_epochs(self.num_epochs)
        return super()._make_loop(runner)


class BatchTraining(HookedTraining, OwnTraining):
    steps_kind = HandSteps

    def _make_loop(self, runner: Any) -> BaseLoop:
        loop = cast(HandSteps, super()._make_loop(runner))
        runner = cast("BatchRunner", runner)
        if loop.several and loop.accumulates:
            raise UserError(
                f"{self._name} with several optimizers takes each step where the script calls "
                "optimizer.step(); leave accumulate and precision out"
            )
        if self.settings.evaluate_every is not None:
            raise UserError(
                f"evaluate_every with {self._name}, whose hooks are told of one loader after the "
                "other; leave it out, and write steps_per_epoch=… for shorter epochs"
            )
        runner.need_early_stop = False
        runner.tell_epochs(self.num_epochs)
        runner.attach(loop, self.settings.callbacks)
        for callback in runner.callbacks:
            if isinstance(callback, BatchPart):
                callback.begin(runner)
        measuring = [one for one in runner.callbacks if isinstance(one, MetricCallback)]
        self._loader_means = {
            name: LoaderMeans(measuring, self.world, feed in loop.trained, loop.counts)
            for name, feed in loop.feeds.items()
        }
        loop.measures = dict(self._loader_means)
        self.metrics = loop.measures
        return loop

    def run(self) -> Any:
        runner = self.runner
        try:
            return super().run()
        finally:
            own = self.settings.own
            optimizers = own.optimizers if own.several else next(iter(own.optimizers.values()))
            runner.detach(self.settings.given_model, optimizers)

    def _take_with(self, feed: Feed) -> Callable[[Any], None]:
        self.runner.begin_loader(feed.name, True, self._loader_means[feed.name])
        return super()._take_with(feed)

    def _means(self, feed: Feed) -> dict[str, float]:
        return self._ended(super()._means(feed))

    def _measure(self, feed: Feed) -> dict[str, float]:
        means = self._loader_means[feed.name]
        means.start(f"{feed.name} of epoch {self.epoch + 1}")
        self.runner.begin_loader(feed.name, False, means)
        return self._ended(super()._measure(feed) | means.of_callbacks())

    def _ended(self, values: dict[str, float]) -> dict[str, float]:
        ended: dict[str, float] = self.runner.end_loader(values, self.world)
        return ended
