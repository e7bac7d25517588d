"""Calling a model without training it: metrics over whole loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.data import CountedRows, Feed, is_samples, to_device
from allhands.errors import UserError
from allhands.loop.reporter import Pace, Reporter
from allhands.runner.keys import chosen_output
from allhands.runner.metrics import LoaderMetrics
from allhands.step import LossRule, OverBatch, Precision, WholeBatch
from allhands.step.counted import as_count, split_pair
from allhands.step.exchange import Placement
from allhands.step.modes import evaluation_mode
from allhands.strategies.base import OutputElsewhere, Strategy

if TYPE_CHECKING:
    from allhands.runner.supervised import SupervisedRunner

HandleBatch = Callable[[nn.Module, Any], tuple[Any, Any]]


class Forward:
    """Moves a batch to the device and has the runner call the model on it.

    Args:
        runner: whose `handle_batch` it is.
        module: the model that is called.
        device: where the batch goes.
        criterion: what the output and the target are for. One that compares them element by element
            gets the target in the output's shape, see `fitting`. One that takes the whole output
            gets it; others get what the runner's `output_key` names.
        say: is told once when that changes the target's shape.
    """

    def __init__(
        self,
        runner: SupervisedRunner,
        module: nn.Module,
        device: torch.device,
        criterion: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.handle_batch = fitting(runner.handle_batch, criterion, say, runner.output_member)
        self.target_of, self.rows_of = runner.target_of, runner.rows_of
        self.module = module
        self.device = device
        self.moves = device.type != "cpu"

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        if self.moves:
            batch = to_device(batch, self.device)
        return self.handle_batch(self.module, batch)


def metrics_take(runner: SupervisedRunner, criterion: Any) -> str | None:
    """What metrics take of the output that the criterion has taken: what `output_key` names, where
    the criterion takes the whole output. None: what the criterion takes."""
    return runner.output_member if _takes_whole(criterion) else None


def _takes_whole(criterion: Any) -> bool:
    return bool(getattr(criterion, "takes_whole_output", False))


def fitting(
    handle_batch: HandleBatch,
    criterion: Any,
    say: Callable[[str], None] | None = None,
    output_key: str | None = None,
) -> HandleBatch:
    """`handle_batch` with what the criterion takes: what `output_key` names of the output, and a
    target of the output's shape for a criterion that compares the two element by element.

    The latter only where a last dimension of size 1 tells them apart, ``[batch, 1]`` and
    ``[batch]``: what is meant is certain there, and broadcasting would compare every output with
    every target. For other criteria it is `handle_batch` itself.

    Args:
        handle_batch: ``(model, batch)`` to ``(output, target)``.
        criterion: what the two are for; None is no such criterion.
        say: is told once that the target is read in another shape.
        output_key: the runner's.
    """
    if output_key is not None and not _takes_whole(criterion):
        handle_batch = _Chosen(handle_batch, output_key)
    if criterion is not None and LossRule(criterion).elementwise:
        return _Fitting(handle_batch, say)
    return handle_batch


class _Chosen:
    """`handle_batch` with what `output_key` names of its output; a class so that it pickles."""

    def __init__(self, handle_batch: HandleBatch, key: str) -> None:
        self.handle_batch, self.key = handle_batch, key

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        output, target = self.handle_batch(model, batch)
        return chosen_output(output, self.key), target


class _Fitting:
    """See `fitting`; a class so that it pickles."""

    def __init__(self, handle_batch: HandleBatch, say: Callable[[str], None] | None) -> None:
        self.handle_batch = handle_batch
        self.say = say
        self._fits = False  # the first pair had one shape, as all others then have

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        output, target = self.handle_batch(model, batch)
        if (
            self._fits
            or not isinstance(output, torch.Tensor)
            or not isinstance(target, torch.Tensor)
        ):
            return output, target
        wanted, given = output.shape, target.shape
        if wanted == given or (wanted != (*given, 1) and given != (*wanted, 1)):
            self._fits = wanted == given
            return output, target
        if self.say is not None:
            self.say(
                f"note: the target of shape {list(given)} is read in the output's shape, "
                f"{list(wanted)}"
            )
            self.say = None
        return output, target.reshape(wanted)


def choose_valid_loader(feeds: Mapping[str, Feed], chosen: str | None) -> str:
    """The loader whose metric decides: `chosen`, else "valid", else the first that is not trained
    on, else the trained one."""
    trained = [name for name in feeds if name.startswith("train")]
    if not trained:
        raise UserError(f"no loader's name begins with 'train'; given are: {', '.join(feeds)}")
    if chosen is None:
        others = [name for name in feeds if name not in trained]
        return "valid" if "valid" in feeds else others[0] if others else trained[0]
    if chosen not in feeds:
        raise UserError(
            f"valid_loader={chosen!r} is not among the loaders; given are: {', '.join(feeds)}"
        )
    return chosen


def loss_rule(criterion: Any, feed: Feed, runner: SupervisedRunner, slices: Any = None) -> LossRule:
    """How the criterion counts on this loader's data; `slices` as `Strategy.slices` gives it."""
    rule = LossRule(criterion)
    rule.one_target_a_sample = runner.plain_batches and not feed.own_collate
    if feed.targets is not None and runner.takes_last_as_target:
        rule.use_samples_if_equal(feed.targets)
    if slices is not None:
        rule.cut_over(slices)
    return rule


def check_over_batch(criterion: Any, strategy: Strategy, workers: int) -> None:
    """Raise `UserError` for a loss of whole global batches (`OverBatch`) that cannot be computed
    with this strategy."""
    if isinstance(criterion, OverBatch) and (refused := strategy.over_batch_refused(workers)):
        raise UserError(f"criterion=OverBatch(…) with strategy '{strategy.name}': {refused}")


def evaluate_feed(
    feed: Feed,
    steps: Iterator[Any],
    model: nn.Module,
    forward: Forward,
    rule: LossRule,
    metrics: LoaderMetrics,
    precision: Precision,
    reporter: Reporter,
    label: str,
    placement: Placement | None = None,
) -> dict[str, float]:
    """The loss and the metrics of a loader, in evaluation mode and without gradients; the same on
    every rank.

    `placement` says which share of the samples this rank has; None is its own.
    """
    metrics.start(label)
    share = metrics.world.rank if placement is None else placement.share
    whole = WholeBatch(metrics.world, share, metrics.counts) if rule.over_batch else None
    pace, done, pairs = Pace(), 0, None
    if feed.own_collate:
        steps = CountedRows(feed, forward.rows_of)(steps)
    # The bare model is called: gradients are not exchanged here, and ranks may have different
    # numbers of batches.
    module, forward.module = forward.module, model
    try:
        with evaluation_mode(model), torch.no_grad(), precision.autocast():
            for batches, counts, _, _ in steps:
                metrics.step = done
                if whole is not None:
                    _measure_whole(whole, batches, counts, forward, rule, metrics)
                for batch, count in zip(batches, counts, strict=True) if whole is None else ():
                    try:
                        output, target = forward(batch)
                    except OutputElsewhere:
                        continue
                    if not count:
                        continue  # it was there for the ranks that call the model with this one
                    if done == 0:
                        rule.check_shapes(output, target)
                    if rule.counts_targets:
                        counted = rule.count_targets(
                            [forward.target_of(to_device(batch, forward.device))]
                        )
                        assert counted is not None
                        factor, counts_for = 1.0, counted[0]
                    else:
                        factor, counts_for = 1.0 if rule.sums else count, count
                    loss: Any = rule.call(output, target)
                    if loss is None and is_samples(output):
                        metrics.observe(output, target, None, 1.0, 0)
                        continue
                    pairs = isinstance(loss, tuple)
                    if rule.check is not None and not pairs:
                        rule.check.look(output, target)
                    if pairs:
                        loss, counts_for = split_pair(loss) if done == 0 else loss
                        factor, counts_for = 1.0, as_count(counts_for)
                    if done == 0:
                        rule.check_value(loss)
                        rule.check_counts(output, target, loss)
                    metrics.observe(output, target, loss, factor, counts_for)
                done += 1
                if reporter.shows_bar and done >= pace.next_look and pace.due(done):
                    reporter.progress(label, done, feed.num_steps, metrics.running_loss())
    finally:
        forward.module = module
        if placement is not None:
            placement.evaluated()
    if rule.check is not None:
        rule.settle(pairs, metrics.world.world_size > 1, metrics.world)
    return metrics.result()


def _measure_whole(
    whole: WholeBatch,
    batches: Sequence[Any],
    counts: Sequence[int],
    forward: Forward,
    rule: LossRule,
    metrics: LoaderMetrics,
) -> None:
    """Take in one global batch, of whose loss each micro-batch counts by its samples; all ranks
    call it together."""
    made = [(*forward(batch), count) for batch, count in zip(batches, counts, strict=True)]
    real = [(output, target, count) for output, target, count in made if count]
    gathered = whole([(output, target) for output, target, _ in real])
    if gathered is not None:
        loss = rule.call(*gathered)
        rule.check_value(loss)
        for output, target, count in real:
            metrics.observe(output, target, loss, count, count)
