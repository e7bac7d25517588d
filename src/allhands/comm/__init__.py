"""What is said between processes. Nothing here pickles: numbers travel as tensors, text as
bytes."""

from __future__ import annotations

from allhands.comm import calls
from allhands.comm.collectives import (
    all_gather_ragged,
    all_gather_rows,
    all_gather_single,
    all_gather_text,
    all_reduce_sum,
    broadcast_bytes,
    broadcast_ints,
    broadcast_new,
    broadcast_tensors,
    mean_buffers,
    sum_gradients,
    sums_of_ranks,
)

__all__ = [
    "all_gather_ragged",
    "all_gather_rows",
    "all_gather_single",
    "all_gather_text",
    "all_reduce_sum",
    "broadcast_bytes",
    "broadcast_ints",
    "broadcast_new",
    "broadcast_tensors",
    "calls",
    "mean_buffers",
    "sum_gradients",
    "sums_of_ranks",
]
