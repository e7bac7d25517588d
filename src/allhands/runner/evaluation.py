"""Calling a model without training it: metrics over whole loaders, and one prediction a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allhands.comm import all_gather_rows, all_gather_text
from allhands.data import CountedRows, Feed, to_device
from allhands.errors import UserError
from allhands.loop.reporter import Pace, Reporter
from allhands.runner.metrics import LoaderMetrics
from allhands.step import LossRule, OverBatch, Precision, WholeBatch
from allhands.step.counted import as_count, split_pair
from allhands.step.exchange import Placement
from allhands.step.modes import evaluation_mode
from allhands.strategies.base import OutputElsewhere, Strategy
from allhands.world import World

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
            gets the target in the output's shape, see `fitting`.
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
        self.handle_batch = fitting(runner.handle_batch, criterion, say)
        self.target_of, self.rows_of = runner.target_of, runner.rows_of
        self.module = module
        self.device = device
        self.moves = device.type != "cpu"

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        if self.moves:
            batch = to_device(batch, self.device)
        return self.handle_batch(self.module, batch)


def fitting(
    handle_batch: HandleBatch, criterion: Any, say: Callable[[str], None] | None = None
) -> HandleBatch:
    """`handle_batch` whose target has the output's shape, for a criterion that compares the two
    element by element.

    Only where a last dimension of size 1 tells them apart, ``[batch, 1]`` and ``[batch]``: what is
    meant is certain there, and broadcasting would compare every output with every target. For other
    criteria it is `handle_batch` itself.

    Args:
        handle_batch: ``(model, batch)`` to ``(output, target)``.
        criterion: what the two are for; None is no such criterion.
        say: is told once that the target is read in another shape.
    """
    return (
        _Fitting(handle_batch, say)
        if criterion is not None and LossRule(criterion).elementwise
        else handle_batch
    )


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
    if feed.targets is not None and runner.takes_last_as_target:
        rule.use_samples_if_equal(feed.targets)
    if slices is not None:
        rule.call, rule.mean_call = (
            slices.loss_function(rule.call),
            slices.loss_function(rule.mean_call),
        )
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


def predict_feed(
    feed: Feed,
    model: nn.Module,
    forward: Forward,
    precision: Precision,
    world: World,
    placement: Placement,
) -> Any:
    """The model's output for every sample, in the order of the feed, on every rank, as CPU tensors.

    Raises:
        UserError: an output's first dimension is not the batch; a stream that is split by rank.
    """
    if not feed.ordered:
        raise UserError(
            "predict gives one row a sample in the order of the stream, and that of loader "
            f"'{feed.name}' is split by rank; pass a stream that gives all samples on every rank"
        )
    steps = feed.epoch(0)
    if feed.own_collate:
        steps = CountedRows(feed, forward.rows_of)(steps)
    gives, slices = placement.counts, placement.slices
    counts_by_step: list[int] = []
    outputs: list[list[torch.Tensor]] = []
    tree: Any = None
    try:
        with evaluation_mode(model), torch.no_grad(), precision.autocast():
            for batches, counts, _, _ in steps:
                for batch, count in zip(batches, counts, strict=True):
                    try:
                        output, _ = forward(batch)
                    except OutputElsewhere:
                        continue
                    if slices is not None:
                        output = slices.full_output(output)
                    if not gives or not count:
                        # another rank has the same rows, or waits for this one in its own call
                        continue
                    tree, leaves = _flatten(output)
                    for leaf in leaves:
                        if leaf.dim() == 0 or len(leaf) != count:
                            raise UserError(
                                f"the model gave an output of shape {list(leaf.shape)} for a batch "
                                f"of {count} rows; predict "
                                "needs outputs whose first dimension is the batch"
                            )
                    outputs.append(
                        [
                            leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
                            for leaf in leaves
                        ]
                    )
                counts_by_step.append(sum(counts) if gives else 0)
    finally:
        placement.evaluated()
    columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
    if world.world_size == 1 and outputs:
        return _rebuild(tree, iter([column.cpu() for column in columns]))
    return _gather(columns, tree, counts_by_step, world, placement.share if gives else None)


def _gather(
    columns: list[torch.Tensor],
    tree: Any,
    counts_by_step: list[int],
    world: World,
    share: int | None,
) -> Any:
    """The rows of all ranks; this one has those of `share`, or none."""
    # A rank that had no row does not know what the model gives.
    leaves = [[list(c.shape[1:]), str(c.dtype).removeprefix("torch.")] for c in columns]
    described = {"tree": tree, "leaves": leaves, "share": share}
    said = [json.loads(text) for text in all_gather_text(json.dumps(described), world)]
    known = next((one for one in said if one["tree"] is not None), None)
    if known is None:
        raise UserError(
            "predict: the collate function has dropped every sample, so there is no row to give"
        )
    if not columns:
        columns = [
            torch.empty(0, *shape, dtype=getattr(torch, dtype), device=world.device)
            for shape, dtype in known["leaves"]
        ]
    steps = all_gather_rows(
        torch.tensor(counts_by_step, dtype=torch.int64, device=world.device), world
    )
    givers = sorted(
        (one["share"], rank) for rank, one in enumerate(said) if one["share"] is not None
    )
    gathered = []
    for column in columns:
        by_rank = [part.cpu() for part in all_gather_rows(column, world)]
        pieces = [part.split(counts.tolist()) for part, counts in zip(by_rank, steps, strict=True)]
        # Within a step the ranks hold contiguous shares, in the order of the shares.
        gathered.append(
            torch.cat(
                [pieces[rank][step] for step in range(len(counts_by_step)) for _, rank in givers]
            )
        )
    return _rebuild(known["tree"], iter(gathered))


def _flatten(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The shape of a tree of tuples, lists and dicts as plain JSON, and its tensors in order."""
    if isinstance(output, torch.Tensor):
        return "tensor", [output]
    if isinstance(output, Mapping):
        if not all(isinstance(key, str) for key in output):
            raise UserError("predict: a dict that the model gives must have strings as keys")
        parts = [_flatten(value) for value in output.values()]
        return ["dict", list(output), [tree for tree, _ in parts]], [
            leaf for _, leaves in parts for leaf in leaves
        ]
    if isinstance(output, (list, tuple)):
        parts = [_flatten(value) for value in output]
        name = "tuple" if isinstance(output, tuple) else "list"
        return [name, [], [tree for tree, _ in parts]], [
            leaf for _, leaves in parts for leaf in leaves
        ]
    raise UserError(
        f"the model gave a {type(output).__name__}; predict needs tensors, or tuples, lists or "
        "dicts of them"
    )


def _rebuild(tree: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if tree == "tensor":
        return next(leaves)
    kind, keys, children = tree
    values = [_rebuild(child, leaves) for child in children]
    return (
        dict(zip(keys, values, strict=True))
        if kind == "dict"
        else tuple(values)
        if kind == "tuple"
        else values
    )
