"""Which part of which key lies on which server.

Keys are cut into chunks by bytes, and the chunks dealt out largest first, each to the server that
holds least (the rule of longest processing time first; R. L. Graham, "Bounds on multiprocessing
timing anomalies", 1969).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allhands.errors import UserError

# Bytes of the largest chunk. Sending, adding up and updating overlap from chunk to chunk, and each
# chunk costs some tens of microseconds: on 2 cores, 100 MB in chunks of 4 MB took a tenth less time
# than in chunks of 2 MB, and in 8 MB no less than in 4.
CHUNK_BYTES = 4 << 20
_SMALLEST = 64 << 10
# So many chunks a server keep the fullest within 5 % of the mean (tests/kvstore/test_placement.py).
_CHUNKS_A_SERVER = 32

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int8,
    )
}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    short = str(dtype).removeprefix("torch.")
    if short not in DTYPES:
        raise UserError(
            f"the value for '{name}' is {short}; a key-value store holds {', '.join(DTYPES)}"
        )
    return short


@dataclass(frozen=True)
class KeyPiece:
    """Numbers `start` to `stop` of a key, flattened; on which server, and the chunk's number in the
    whole job."""

    number: int
    server: int
    start: int
    stop: int


def chunk_limit(total: int, servers: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    if servers == 1:
        return chunk_bytes
    return max(min(chunk_bytes, total // (servers * _CHUNKS_A_SERVER)), min(_SMALLEST, chunk_bytes))


def place(
    sizes: Mapping[str, tuple[int, int]],
    loads: Sequence[int],
    first: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, list[KeyPiece]]:
    """Cut keys and deal them out.

    Args:
        sizes: by key, how many numbers, and bytes of one.
        loads: bytes that each server holds already.
        first: the number of the first chunk.
        chunk_bytes: of the largest chunk.

    Returns:
        By key, its pieces in order. The same for the same arguments, whatever the order of `sizes`.
    """
    limit = chunk_limit(
        sum(count * size for count, size in sizes.values()), len(loads), chunk_bytes
    )
    cuts: list[tuple[int, str, int, int]] = []
    for name, (count, size) in sizes.items():
        parts = max(1, -(-count * size // limit))
        edges = [count * part // parts for part in range(parts + 1)]
        cuts += [
            (-(stop - start) * size, name, start, stop) for start, stop in itertools.pairwise(edges)
        ]
    heap = [(load, server) for server, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen: dict[tuple[str, int], int] = {}
    for negative, name, start, _ in sorted(cuts):
        load, server = heap[0]
        heapq.heapreplace(heap, (load - negative, server))
        chosen[name, start] = server
    placed: dict[str, list[KeyPiece]] = {}
    for number, (name, start, stop) in enumerate(
        sorted((name, start, stop) for _, name, start, stop in cuts)
    ):
        placed.setdefault(name, []).append(
            KeyPiece(first + number, chosen[name, start], start, stop)
        )
    return placed
