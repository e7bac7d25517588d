"""What each worker sees: the global order of the samples, its share of it, and the feeds that read
it."""

from __future__ import annotations

from allhands.data.build import Source, build_feeds, sources_from_datasets, sources_from_loaders
from allhands.data.counted_rows import CountedRows
from allhands.data.feed import Feed
from allhands.data.mixup import Mixup
from allhands.data.order import Dealer, global_order, share_of
from allhands.data.random import derive_seed, preserved_generators, seed_everything
from allhands.data.split import SplitByRank
from allhands.data.trees import (
    is_samples,
    map_tensors,
    named_members,
    rows_in,
    tensors_in,
    to_device,
)

__all__ = [
    "CountedRows",
    "Dealer",
    "Feed",
    "Mixup",
    "Source",
    "SplitByRank",
    "build_feeds",
    "derive_seed",
    "global_order",
    "is_samples",
    "map_tensors",
    "named_members",
    "preserved_generators",
    "rows_in",
    "seed_everything",
    "share_of",
    "sources_from_datasets",
    "sources_from_loaders",
    "tensors_in",
    "to_device",
]
