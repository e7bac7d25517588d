"""What `SupervisedRunner.evaluate` and `predict` do on each rank, in a hook of a training and
elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.data import build_feeds, preserved_generators
from allhands.loop.reporter import Reporter
from allhands.runner.evaluation import (
    Forward,
    check_over_batch,
    evaluate_feed,
    loss_rule,
    metrics_take,
)
from allhands.runner.metrics import LoaderMetrics, metrics_by_loader
from allhands.runner.prediction import predict_feed
from allhands.runner.running import in_training
from allhands.step import Precision
from allhands.step.exchange import Placement
from allhands.strategies import DDP, Strategy
from allhands.world import World

if TYPE_CHECKING:
    from allhands.runner.supervised import SupervisedRunner


def evaluate(
    runner: SupervisedRunner, given: Any, world: World, reporter: Reporter, shipped: bool
) -> Any:
    """The loss and the metrics of every loader; see `SupervisedRunner.evaluate`."""
    model, criterion, data, metrics, precision, seed = given
    criterion_there = (
        on_device(criterion, world.device) if isinstance(criterion, nn.Module) else nullcontext()
    )
    number = Precision(precision, world.device)
    with preserved_generators(), _placed(model, world, number) as placed, criterion_there:
        module, strategy, placement = placed
        if placement.level:
            check_over_batch(criterion, strategy, world.world_size)
        feeds = _feeds(data.sources(seed), world, seed, shipped, placement)
        forward = Forward(runner, module, world.device, criterion, reporter.line)
        counts, slices = placement.counts, placement.slices
        by_loader, values = metrics_by_loader(metrics, feeds), {}
        for name, feed in feeds.items():
            rule = loss_rule(criterion, feed, runner, slices)
            measured = LoaderMetrics(
                by_loader[name],
                world,
                trains=False,
                counts=counts,
                slices=slices,
                output_key=metrics_take(runner, criterion),
                say=reporter.line,
            )
            steps = feed.epoch(0)
            values[name] = evaluate_feed(
                feed, steps, module, forward, rule, measured, number, reporter, name, placement
            )
        reporter.close()
    return values


def predict(
    runner: SupervisedRunner, given: Any, world: World, reporter: Reporter, shipped: bool
) -> Any:
    """The model's output for every sample; see `SupervisedRunner.predict`."""
    model, data, precision, seed = given
    sources = data.sources(seed)
    for source in sources.values():
        source.shuffle = False
    number = Precision(precision, world.device)
    with preserved_generators(), _placed(model, world, number) as (module, _, placement):
        (feed,) = _feeds(sources, world, seed, shipped, placement).values()
        forward = Forward(runner, module, world.device)
        return predict_feed(feed, module, forward, number, world, placement)


def _feeds(sources: Any, world: World, seed: int, shipped: bool, placement: Placement) -> Any:
    same = shipped and world.local_world_size == world.world_size
    return build_feeds(
        sources,
        world,
        seed,
        same_everywhere=same,
        place=(placement.share, placement.shares),
        level=placement.level,
    )


@contextmanager
def _placed(
    model: nn.Module, world: World, precision: Precision
) -> Iterator[tuple[nn.Module, Strategy, Placement]]:
    """The module to call, the strategy by which it lies on the ranks, and how it does. That of a
    training computes as the training has it."""
    module, training = in_training(model)
    if training is None:
        with on_device(module, world.device), precision.of_calls(module):
            yield module, DDP(), Placement(module, world)
        return
    with training.loop.state.buffers_made_equal():
        yield module, training.settings.strategy, training.loop.placement


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, the module is on `device`; afterwards it is where it was."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    home = device if first is None else first.device
    module.to(device)
    try:
        yield
    finally:
        module.to(home)
