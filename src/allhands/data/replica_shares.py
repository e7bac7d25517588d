"""The shares of several logical workers, which one rank reads one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allhands.data.order import share_of
from allhands.data.prefetch import StepBatch


class ReplicaCounts(list[int]):
    """Samples in each micro-batch of a step, and which logical worker each micro-batch is of.

    Attributes:
        sizes: how many micro-batches each logical worker has, in their order.
        first: position in the global batch of the first sample.
    """

    def __init__(self, counts: Sequence[Sequence[int]], first: int) -> None:
        super().__init__(count for own in counts for count in own)
        self.sizes, self.first = [len(own) for own in counts], first


def put_together(
    steps: Sequence[Iterator[StepBatch]], first: int, shares: int, reads: bool
) -> Iterator[StepBatch]:
    """The steps of several shares as those of one, with `ReplicaCounts`.

    Args:
        steps: of each share.
        first: number of the first share.
        shares: how many there are in all.
        reads: False: the steps are only counted, and hold no micro-batch.
    """
    for parts in zip(*steps, strict=True):
        total = parts[0][2]
        begins = share_of(total, first, shares)[0]
        if not reads:
            yield [], ReplicaCounts([], begins), total, False
            continue
        batches = [batch for own, _, _, _ in parts for batch in own]
        yield batches, ReplicaCounts([counts for _, counts, _, _ in parts], begins), total, False


def of_each(step: StepBatch) -> Iterator[StepBatch]:
    """The steps that `put_together` has joined."""
    batches, counts, total, _ = step
    assert isinstance(counts, ReplicaCounts)
    begins = 0
    for size in counts.sizes:
        part = slice(begins, begins + size)
        yield batches[part], list(counts[part]), total, False
        begins += size
