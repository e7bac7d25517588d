"""One prediction a sample, in the order of the data set, on any number of workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from allhands.comm import all_gather_ragged, all_gather_rows, all_gather_text
from allhands.data import CountedRows, Feed, is_samples, named_members
from allhands.errors import UserError, kind_of
from allhands.runner.evaluation import Forward
from allhands.step import Precision
from allhands.step.counted import output_advice
from allhands.step.exchange import Placement
from allhands.step.modes import evaluation_mode
from allhands.strategies.base import OutputElsewhere
from allhands.world import World


def predict_feed(
    feed: Feed,
    model: torch.nn.Module,
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
    found = _Outputs()
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
                    # else another rank has the same rows, or waits for this one in its own call
                    if gives and count:
                        found.add(output, count)
                counts_by_step.append(sum(counts) if gives else 0)
    finally:
        placement.evaluated()
    rows = found.put_together()
    if world.world_size > 1 or rows.tree is None:
        rows = _gather(rows, counts_by_step, world, placement.share if gives else None)
    return rows.rebuilt()


@dataclasses.dataclass
class _Table:
    """Predictions as columns.

    Attributes:
        tree: the form of the output, or of a sample's, as plain JSON; None where there is no row.
        by_sample: the model gives a list with a member for each sample.
        columns: tensors ``[samples, …]``; where `by_sample`, lists with a tensor for each sample.
    """

    tree: Any
    by_sample: bool
    columns: list[Any]

    def rebuilt(self) -> Any:
        """The predictions in the form of the output, on the CPU."""
        if not self.by_sample:
            return _rebuild(self.tree, iter([column.cpu() for column in self.columns]))
        rows = zip(*self.columns, strict=True)
        return [_rebuild(self.tree, iter([leaf.cpu() for leaf in row])) for row in rows]


class _Outputs:
    def __init__(self) -> None:
        self.tree: Any = None
        self.outputs: list[list[torch.Tensor]] = []
        self.by_sample = False

    def add(self, output: Any, count: int) -> None:
        """Take in the output for a batch of `count` rows.

        Raises:
            UserError: it has no row for each.
        """
        self.by_sample = is_samples(output)
        if not self.by_sample:
            self._add_row(output, count)
            return
        if len(output) != count:
            raise UserError(
                f"the model gave a list of {len(output)} dicts for a batch of {count} rows; "
                "predict takes such a list as one dict a sample. Let the model give a tuple for "
                "anything else"
            )
        for sample in output:
            self._add_row(sample, None)

    def _add_row(self, output: Any, count: int | None) -> None:
        tree, leaves = _flatten(output)
        if self.tree is not None and tree != self.tree:
            raise UserError(
                f"the model gave outputs of two forms, {json.dumps(self.tree)} and "
                f"{json.dumps(tree)}; predict needs one for all samples"
            )
        self.tree = tree
        for leaf in leaves if count is not None else ():
            if leaf.dim() == 0 or len(leaf) != count:
                raise UserError(
                    f"the model gave an output of shape {list(leaf.shape)} for a batch of {count} "
                    "rows; predict needs outputs whose first dimension is the batch, or a list "
                    f"with a dict for each sample: {output_advice(output)}"
                )
        self.outputs.append(
            [
                leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
                for leaf in leaves
            ]
        )

    def put_together(self) -> _Table:
        """All rows of this rank."""
        columns = [list(column) for column in zip(*self.outputs, strict=True)]
        if not self.by_sample:
            columns = [torch.cat(column) for column in columns]  # type: ignore[misc]
        return _Table(self.tree, self.by_sample, columns)


def _gather(rows: _Table, counts_by_step: list[int], world: World, share: int | None) -> _Table:
    # A rank that had no row does not know what the model gives.
    forms = [None if rows.by_sample else _form(column) for column in rows.columns]
    described = {"tree": rows.tree, "by_sample": rows.by_sample, "forms": forms, "share": share}
    said = [json.loads(text) for text in all_gather_text(json.dumps(described), world)]
    known = next((one for one in said if one["tree"] is not None), None)
    if known is None:
        raise UserError(
            "predict: the collate function has dropped every sample, so there is no row to give"
        )
    if rows.tree is None:
        empty: list[Any] = [
            [] if known["by_sample"] else _empty(form, world) for form in known["forms"]
        ]
        rows = _Table(known["tree"], known["by_sample"], empty)
    steps = all_gather_rows(
        torch.tensor(counts_by_step, dtype=torch.int64, device=world.device), world
    )
    counts = [part.tolist() for part in steps]
    givers = [
        rank
        for _, rank in sorted(
            (one["share"], rank) for rank, one in enumerate(said) if one["share"] is not None
        )
    ]
    columns: list[Any] = []
    for column in rows.columns:
        if rows.by_sample:
            pieces = _in_order(all_gather_ragged(column, world), counts, givers)
            columns.append([leaf for piece in pieces for leaf in piece])
        else:
            by_rank = [part.cpu() for part in all_gather_rows(column, world)]
            columns.append(torch.cat(_in_order(by_rank, counts, givers)))
    return _Table(known["tree"], rows.by_sample, columns)


def _in_order(by_rank: list[Any], counts: list[list[int]], givers: list[int]) -> list[Any]:
    """Parts of what the ranks have, of which each step takes so many rows, in the order of the
    samples: within a step the ranks hold contiguous shares, in the order of the shares."""
    ends = [list(itertools.accumulate(own, initial=0)) for own in counts]
    return [
        by_rank[rank][ends[rank][step] : ends[rank][step + 1]]
        for step in range(len(counts[0]))
        for rank in givers
    ]


def _form(column: torch.Tensor) -> list[Any]:
    return [list(column.shape[1:]), str(column.dtype).removeprefix("torch.")]


def _empty(form: list[Any], world: World) -> torch.Tensor:
    shape, dtype = form
    return torch.empty(0, *shape, dtype=getattr(torch, dtype), device=world.device)


def _flatten(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The form of an output as plain JSON, and its tensors in order."""
    if isinstance(output, torch.Tensor):
        return "tensor", [output]
    if output is None:
        return "none", []
    if isinstance(output, (list, tuple)):
        parts = [_flatten(value) for value in output]
        name = "tuple" if isinstance(output, tuple) else "list"
        return [name, [], [tree for tree, _ in parts]], [
            leaf for _, leaves in parts for leaf in leaves
        ]
    members = named_members(output)
    if members is None or not (isinstance(output, Mapping) or dataclasses.is_dataclass(output)):
        raise UserError(
            f"the model gave {kind_of(output)}; predict needs tensors, or tuples, lists, dicts or "
            "dataclasses of them. SupervisedRunner(output_key=…) takes one part of an output"
        )
    if not all(isinstance(key, str) for key in members):
        raise UserError("predict: a dict that the model gives must have strings as keys")
    parts = [_flatten(value) for value in members.values()]
    return ["dict", list(members), [tree for tree, _ in parts]], [
        leaf for _, leaves in parts for leaf in leaves
    ]


def _rebuild(tree: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if tree == "tensor":
        return next(leaves)
    if tree == "none":
        return None
    kind, keys, children = tree
    values = [_rebuild(child, leaves) for child in children]
    if kind == "dict":
        return dict(zip(keys, values, strict=True))
    return tuple(values) if kind == "tuple" else values
