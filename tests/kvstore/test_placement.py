"""Where keys lie on servers: every number on exactly one, and no server much fuller than
another."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from allhands.errors import UserError
from allhands.kvstore.placement import KeyPiece, chunk_limit, dtype_name, place

Sizes = dict[str, tuple[int, int]]


def _convolutions(widths: list[int], blocks: list[int], deep: bool) -> list[tuple[int, ...]]:
    """The parameters of a residual network for ImageNet: with two convolutions a block, or with
    three."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, count in zip(widths, blocks, strict=True):
        for block in range(count):
            out = width * 4 if deep else width
            kernels = [(width, before, 3), (width, width, 3)]
            if deep:
                kernels = [(width, before, 1), (width, width, 3), (out, width, 1)]
            if block == 0 and (deep or before != width):
                kernels.append((out, before, 1))
            for made, given, size in kernels:
                shapes += [(made, given, size, size), (made,), (made,)]
            before = out
    return [*shapes, (1000, before), (1000,)]


def _separable() -> list[tuple[int, ...]]:
    """MobileNet's first version: a convolution a channel, then one over the channels."""
    shapes: list[tuple[int, ...]] = [(32, 3, 3, 3), (32,), (32,)]
    before = 32
    for width in (64, 128, 128, 256, 256, *[512] * 6, 1024, 1024):
        shapes += [
            (before, 1, 3, 3),
            (before,),
            (before,),
            (width, before, 1, 1),
            (width,),
            (width,),
        ]
        before = width
    return [*shapes, (1000, 1024), (1000,)]


MODELS = {
    "resnet18": (_convolutions([64, 128, 256, 512], [2, 2, 2, 2], False), 11_689_512),
    "resnet50": (_convolutions([64, 128, 256, 512], [3, 4, 6, 3], True), 25_557_032),
    "mobilenet": (_separable(), 4_231_976),
    "mlp": ([(4096, 784), (4096,), (4096, 4096), (4096,), (10, 4096), (10,)], 20_037_642),
}


def _sizes(shapes: list[tuple[int, ...]]) -> Sizes:
    return {f"p{number}": (math.prod(shape), 4) for number, shape in enumerate(shapes)}


def _loads(placed: dict[str, list[KeyPiece]], sizes: Sizes, servers: int) -> list[int]:
    loads = [0] * servers
    for name, pieces in placed.items():
        for piece in pieces:
            loads[piece.server] += (piece.stop - piece.start) * sizes[name][1]
    return loads


@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_servers_of_real_models_are_within_5_percent_of_the_mean(name: str, servers: int) -> None:
    shapes, numbers = MODELS[name]
    sizes = _sizes(shapes)
    assert sum(count for count, _ in sizes.values()) == numbers
    placed = place(sizes, [0] * servers)
    assert sum(map(len, placed.values())) >= 8 * servers
    loads = _loads(placed, sizes, servers)
    assert sum(loads) == 4 * numbers
    assert max(loads) / (sum(loads) / servers) <= 1.05


@pytest.mark.parametrize("seed", range(40))
def test_any_keys_are_covered_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    servers = draw.randint(1, 9)
    sizes = {
        f"k{number}": (
            draw.choice([0, 1, 3, 1000, draw.randint(0, 3_000_000)]),
            draw.choice([1, 2, 4, 8]),
        )
        for number in range(draw.randint(1, 60))
    }
    loads = [draw.randint(0, 1 << 22) for _ in range(servers)]
    placed = place(sizes, loads, first=7)
    assert placed.keys() == sizes.keys()
    limit = chunk_limit(sum(count * size for count, size in sizes.values()), servers)
    numbers: list[int] = []
    for name, (count, size) in sizes.items():
        pieces = placed[name]
        assert [pieces[0].start, *(piece.stop for piece in pieces)] == [
            *(piece.start for piece in pieces),
            count,
        ]
        for piece in pieces:
            assert 0 <= piece.server < servers
            assert (piece.stop - piece.start) * size <= limit + size
        numbers += [piece.number for piece in pieces]
    assert sorted(numbers) == list(range(7, 7 + len(numbers)))

    shuffled = list(sizes)
    draw.shuffle(shuffled)
    assert place({name: sizes[name] for name in shuffled}, loads, first=7) == placed

    # No server is over the mean by more than a chunk, unless it was before.
    total = [old + new for old, new in zip(loads, _loads(placed, sizes, servers), strict=True)]
    assert max(total) <= max(*loads, sum(total) / servers + limit + 8)


def test_keys_that_come_later_fill_up_the_emptier_server() -> None:
    placed = place({"later": (1000, 4)}, [5000, 0], first=3)
    assert placed == {"later": [KeyPiece(3, 1, 0, 1000)]}


def test_numbers_that_servers_cannot_hold_are_refused() -> None:
    value: Any = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(
        UserError, match="the value for 'a' is complex64; a key-value store holds float32, float64"
    ):
        dtype_name("a", value.dtype)
    assert dtype_name("a", torch.bfloat16) == "bfloat16"
