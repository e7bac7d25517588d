"""Metrics of a loader that a runner computes batch by batch, outside of a training."""

from __future__ import annotations

from typing import Any

import torch

from allhands.catalyst.batch_callbacks import BatchPart, MetricCallback
from allhands.catalyst.batch_runner import BatchRunner, models_in
from allhands.catalyst.loader_means import LoaderMeans
from allhands.catalyst.step_engine import BatchEngine
from allhands.data import build_feeds, preserved_generators, seed_everything, to_device
from allhands.loop.logged import Logged
from allhands.loop.reporter import Reporter
from allhands.loop.step_function import Rows
from allhands.runner.standalone import on_device
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
