"""What a rank holds of a plain tensor."""

from __future__ import annotations

import copy

import torch

from allhands.strategies.held import held


def test_rows_in_another_order_are_pieces_of_the_plain_tensor() -> None:
    whole = torch.arange(24.0).view(12, 2)
    # Two slices, each with its half of q, k and v.
    order = torch.tensor([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11])
    local = whole[order]
    kept = held(local, {"tp": (0, 1)}, order)
    assert [(piece.offsets[0], piece.sizes[0], piece.start) for piece in kept.pieces] == [
        (0, 2, 0),
        (4, 2, 2),
        (8, 2, 4),
        (2, 2, 6),
        (6, 2, 8),
        (10, 2, 10),
    ]
    taken = torch.zeros_like(local)
    kept.take(whole, taken)
    assert torch.equal(taken, local)
    assert torch.equal(kept.whole(torch.device("cpu")), whole)


def test_copies_of_what_is_not_sharded() -> None:
    plain = held(torch.zeros(3), {"tp": (1, 2), "dp_shard": (0, 3), "dp_replicate": (0, 1)}, None)
    assert (plain.copies, plain.first) == (6, False)
    assert copy.deepcopy(plain).pieces == plain.pieces
