"""Losses over the whole global batch: outputs are put together over micro-batches and ranks before
the loss is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_text
from allhands.errors import UserError, kind_of
from allhands.step.counted import Counted
from allhands.step.mean_check import NotCutError, leaves_of, map_known
from allhands.world import World


class OverBatch(Counted):
    """A loss that compares the samples of a batch with one another: in-batch negatives, triplets,
    Dice over a batch.

    It is computed once a step, from the outputs and targets of the whole global batch, as one
    process computes it: those of all micro-batches and workers, in the order of the samples. All
    micro-batches' forward passes come first and their activations are kept until the backward pass,
    so `accumulate` does not save their memory.

    Its reported value is the mean over the global batches, weighted by their samples, and so
    depends on the size of a global
    batch: that of `train` or `evaluate`, batch_size x workers (x accumulate, in training).

    Args:
        fn: ``(output, target)`` of the whole global batch to a tensor of shape []. Outputs and
            targets are tensors ``[samples, …]``, or dicts, tuples, lists or dataclasses of them;
            the target may be None. It must not use the model's weights.

    Raises:
        UserError: `fn` cannot be called. Before the first step: a strategy that cannot put a batch
            together. In a step: an output or a target whose first dimension is not the samples.
    """

    pairs = False

    def __init__(self, fn: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        if not callable(fn):
            raise UserError(
                f"OverBatch(fn={kind_of(fn)}): fn must be a function (output, target) -> the loss "
                "of a whole batch"
            )
        self.fn = fn

    def mean(self, output: Any, target: Any) -> torch.Tensor:
        return self.fn(output, target)

    def forward(self, output: Any, target: Any) -> torch.Tensor:
        return self.fn(output, target)


class WholeBatch:
    """Puts the outputs and targets of all ranks together.

    Args:
        world: the processes.
        share: which share of the samples this rank has.
        counts: False where another rank has the same samples.
    """

    def __init__(self, world: World, share: int, counts: bool) -> None:
        self.world, self.share, self.counts = world, share, counts

    def __call__(self, parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any] | None:
        """The outputs and targets of the whole batch, in the order of the samples; all ranks call
        it together.

        Args:
            parts: this rank's, of one micro-batch after another. They go into the whole as they
                are, so that a loss of it can be differentiated by them; those of other ranks are
                constants.

        Returns:
            None on a rank without a part.
        """
        leaves = [_leaves(part) for part in parts]
        own = [torch.cat(column) for column in zip(*leaves, strict=True)]
        if self.world.world_size > 1:
            own = self._gather(own)
        columns = iter(own)
        return map_known(parts[0], lambda _: next(columns)) if parts else None

    def _gather(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        forms = [[list(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch.")] for leaf in own]
        head = json.dumps([self.share, self.counts, len(own[0]) if own else 0, forms])
        heads = [json.loads(text) for text in all_gather_text(head, self.world)]
        known = [head[3] for head in heads if head[3]]
        if any(other != known[0] for other in known):
            raise UserError(
                "OverBatch: the outputs and targets of the ranks have other shapes behind their "
                f"first dimension, or other dtypes: {known[0]} and "
                f"{next(other for other in known if other != known[0])}. Pad them to one shape"
            )
        form = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in known[0]]
        sizes = [
            sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in form) * head[2]
            for head in heads
        ]
        message = torch.zeros(max(sizes), dtype=torch.uint8, device=self.world.device)
        sent = [leaf.detach().contiguous().reshape(-1).view(torch.uint8) for leaf in own]
        if sent:
            message[: sizes[self.world.rank]] = torch.cat(sent)
        messages = [torch.empty_like(message) for _ in heads]
        dist.all_gather(messages, message)
        shares = {head[0]: rank for rank, head in enumerate(heads) if head[1]}
        pieces = []
        for share in sorted(shares):
            rank = shares[share]
            if share == self.share and own:
                pieces.append(own)
            elif heads[rank][2]:
                pieces.append(_read(messages[rank], form, heads[rank][2]))
        return [torch.cat(column) for column in zip(*pieces, strict=True)] if own else []


def slopes_of(
    outputs: Sequence[Sequence[torch.Tensor]], computed: Sequence[Any], counts: Sequence[int]
) -> Iterator[tuple[Sequence[torch.Tensor], list[torch.Tensor]]]:
    """The tensors in each micro-batch's output that need gradients, and these.

    Args:
        outputs: such tensors by micro-batch.
        computed: copies of the outputs, in which the loss has left gradients, of the micro-batches
            that count.
        counts: samples in each micro-batch.
    """
    given = iter(
        [leaf.grad for output in computed for leaf in leaves_of(output) if leaf.requires_grad]
    )
    for leaves, count in zip(outputs, counts, strict=True):
        slopes = [(next(given) if count else None) for _ in leaves]
        yield (
            leaves,
            [
                torch.zeros_like(leaf) if slope is None else slope
                for leaf, slope in zip(leaves, slopes, strict=True)
            ],
        )


def _read(
    message: torch.Tensor, form: list[tuple[tuple[int, ...], torch.dtype]], rows: int
) -> list[torch.Tensor]:
    """The leaves in a message of bytes."""
    found, begin = [], 0
    for shape, dtype in form:
        size = torch.Size((rows, *shape)).numel() * dtype.itemsize
        # A copy begins where memory is allocated, as an element of any dtype must.
        found.append(message[begin : begin + size].clone().view(dtype).view(rows, *shape))
        begin += size
    return found


def _leaves(part: tuple[Any, Any]) -> list[torch.Tensor]:
    try:
        leaves = leaves_of(part)
    except NotCutError as error:
        raise UserError(
            "OverBatch puts the outputs and targets of micro-batches and workers together, and "
            f"got {error}; return tensors "
            "[samples, …], or dicts, tuples, lists or dataclasses of them, from handle_batch"
        ) from None
    if len({len(leaf) if leaf.dim() else None for leaf in leaves}) > 1 or not all(
        leaf.dim() for leaf in leaves
    ):
        raise UserError(
            "OverBatch puts outputs and targets together along their first dimension, the samples, "
            f"and got shapes {', '.join(str(list(leaf.shape)) for leaf in leaves)}; give all of "
            "them the samples first"
        )
    return leaves
