"""How a runner of one's own trains: with the steps that its user has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.data import Feed
from allhands.errors import UserError, kind_of
from allhands.loop.base_loop import BaseLoop
from allhands.loop.epoch import Batch, Evaluation
from allhands.loop.own_checkpoints import OwnCheckpoints
from allhands.loop.own_steps import OwnSteps
from allhands.runner.own_settings import OwnTrainSettings
from allhands.runner.runner_checkpoints import RunnerCheckpoints
from allhands.runner.training import Training

if TYPE_CHECKING:
    from allhands.runner.runner import Runner


class OwnTraining(Training):
    """One call of `Runner.train` with steps of the user's, on one rank."""

    loop: OwnSteps
    settings: OwnTrainSettings
    #: Takes the steps.
    steps_kind: type[OwnSteps] = OwnSteps
    # The epoch was begun in this process, and had a batch.
    _whole = _given = False

    def _make_loop(self, runner: Runner) -> BaseLoop:
        settings = self.settings
        self.runner = runner
        for criterion in settings.criteria:
            criterion.to(self.world.device)
        runner.model, runner.criterion = settings.given_model, settings.criterion
        loop = self.steps_kind(
            settings.of_loop(),
            settings.own,
            self.world,
            self.reporter,
            lambda loop: OwnRunnerCheckpoints(loop, self),
            self.num_epochs,
        )
        self.metrics = loop.measures
        if loop.evaluated_feeds and not runner.validates:
            raise UserError(
                f"loaders has {loop.evaluated_feeds[0].name!r}, which is not trained on, and "
                f"{self._name} has no valid_step; write def valid_step(self, loop, batch), which "
                "returns {'loss': loss}, or leave the loader out"
            )
        runner.setup(loop)
        return loop

    @property
    def _name(self) -> str:
        return type(self.runner).__name__

    @property
    def model(self) -> nn.Module:
        """The model, or what this rank holds of it; where there are several, what holds all."""
        return self.loop.container if self.loop.several else super().model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a dict by name where there are several."""
        if not self.loop.several:
            return super().optimizer
        return {name: group.optimizer for name, group in self.loop.groups.items()}

    def _guard(self) -> AbstractContextManager[None]:
        return self.loop.misuse

    def _take_with(self, feed: Feed) -> Callable[[Any], None]:
        loop, runner = self.loop, self.runner
        assert loop.position is not None
        self._whole, self._given = not loop.position.steps, False

        def take(step: Any) -> None:
            self._given = True
            loop.batch = batch = Batch(loop, step)
            runner.train_step(loop, batch)
            loop.end_iteration()

        return take

    def _means(self, feed: Feed) -> dict[str, float]:
        loop = self.loop
        if self._given and loop.elastic is None and not loop.measures[feed.name].batches:
            raise UserError(
                f"{self._name}.train_step took no step; call loop.step(loss_of, batch) in it"
            )
        if self.settings.evaluate_every is None and self._whole:
            loop.check_used()
        return loop.measured(feed.name)

    def _measure(self, feed: Feed) -> dict[str, float]:
        loop = self.loop
        with loop.without_gradients():
            evaluation = Evaluation(loop, feed.name, loop.evaluation(feed))
            for batch in evaluation.batches:
                values = self.runner.valid_step(loop, batch)
                evaluation.take(_values(values, f"{self._name}.valid_step"))
            evaluation.close()
        return dict(evaluation)


class OwnRunnerCheckpoints(RunnerCheckpoints, OwnCheckpoints):
    """The history, the best value, the callbacks, and models that no optimizer trains."""

    def load_rest(self, state: dict[str, Any]) -> None:
        super().load_rest(state)
        self.loop.history = self.training.history


def _values(given: Any, where: str) -> Mapping[str, Any]:
    """What a step has measured, by name."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, (torch.Tensor, float, int, tuple)):
        return {"loss": given}
    what = "nothing" if given is None else kind_of(given)
    raise UserError(
        f"{where} returned {what}; return a dict of means over the samples of the batch, or of "
        "pairs (sum, count): {'loss': loss}"
    )
