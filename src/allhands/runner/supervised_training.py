"""How a `SupervisedRunner` trains: its own step, a criterion and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from allhands.data import Feed
from allhands.loop.base_loop import BaseLoop
from allhands.loop.task import Objective, Task
from allhands.runner.evaluation import Forward, evaluate_feed, loss_rule, metrics_take
from allhands.runner.metrics import LoaderMetrics, metrics_by_loader
from allhands.runner.runner_checkpoints import RunnerCheckpoints
from allhands.runner.train_settings import TrainSettings
from allhands.runner.training import Training
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.supervised import SupervisedRunner


class SupervisedTraining(Training):
    """One call of `SupervisedRunner.train`, on one rank."""

    metrics: dict[str, LoaderMetrics]

    def _make_loop(self, runner: SupervisedRunner) -> BaseLoop:
        settings, world = self.settings, self.world
        task = Task(
            call=_call(runner, settings, world),
            criterion=settings.criterion,
            rows_of=runner.rows_of,
            own_calls="" if runner.plain_batches else "handle_batch is your own",
            outputs="kept" if settings.metrics else "unread",
            shows_gradients=bool(self._step_hooks),
            runner=runner,
        )
        loop = BaseLoop(
            settings,
            world,
            self.reporter,
            task,
            lambda loop: RunnerCheckpoints(loop, self),
            self.num_epochs,
        )
        if isinstance(settings.criterion, nn.Module):
            settings.criterion.to(world.device)
        self.forward = Forward(
            runner, loop.called, world.device, settings.criterion, self.reporter.line
        )
        metrics = metrics_by_loader(settings.metrics, loop.feeds)
        self.metrics = {
            name: LoaderMetrics(
                metrics[name],
                world,
                trains=feed in loop.trained,
                counts=loop.counts,
                slices=loop.slices,
                output_key=metrics_take(runner, settings.criterion),
                say=self.reporter.line,
            )
            for name, feed in loop.feeds.items()
        }
        self._objectives = {
            name: self._objective(loop, feed, runner) for name, feed in loop.feeds.items()
        }
        loop.rebound = self._rebound
        loop.measures = self.metrics
        loop.rules = lambda: [one.rule for one in self._objectives.values()]
        loop.losses = [self._objectives[feed.name].rule.call for feed in loop.trained]
        return loop

    def _rebound(self) -> None:
        self.forward.module = self.loop.called

    def _objective(self, loop: BaseLoop, feed: Feed, runner: SupervisedRunner) -> Objective:
        rule = loss_rule(self.settings.criterion, feed, runner, loop.slices)
        rule.note = self.reporter.line
        if feed not in loop.trained:
            rule.leave_unchecked()  # the criterion is looked at in training
        metrics = self.metrics[feed.name]
        return Objective(self.forward, rule, self.forward.target_of, lambda: metrics.observe)

    def _take_with(self, feed: Feed) -> Callable[[Any], None]:
        return partial(self.loop.step, self._objectives[feed.name])

    def _means(self, feed: Feed) -> dict[str, float]:
        loop = self.loop
        values = self.metrics[feed.name].result() | loop.exchange.epoch_values()
        return values | loop.logged.means(taken=values) if self.settings.callbacks else values

    def _measure(self, feed: Feed) -> dict[str, float]:
        loop = self.loop
        return evaluate_feed(
            feed,
            loop.evaluation(feed),
            self.model,
            self.forward,
            self._objectives[feed.name].rule,
            self.metrics[feed.name],
            loop.precision,
            self.reporter,
            self._label(feed),
            loop.placement,
        )


def _call(
    runner: SupervisedRunner, settings: TrainSettings, world: World
) -> Callable[[nn.Module, Any], Any]:
    def call(module: nn.Module, batch: Any) -> Any:
        return Forward(runner, module, world.device, settings.criterion)(batch)

    return call
