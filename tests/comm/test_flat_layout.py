"""Flat layouts: places, gaps, memory formats, and what is done to all tensors at once."""

from __future__ import annotations

import pytest
import torch

from allhands.comm.flat_layout import FlatLayout, fused, joined


def tensors() -> dict[str, torch.Tensor]:
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return {
        "a": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 5),
        "image": image,
    }


@pytest.mark.parametrize(
    "options", [{}, {"align": 8}, {"start": 3}, {"align": 4, "start": 4}, {"strided": True}]
)
def test_tensors_go_into_a_vector_and_come_back(options: dict[str, int]) -> None:
    given = tensors()
    layout = FlatLayout(given, **options)
    align = options.get("align", 1)
    assert all(
        place.start % align == 0 or place.start == options.get("start") for place in layout.places
    )
    flat = torch.full((layout.length + 2,), -1.0)
    for view, value in zip(layout.views(flat), given.values(), strict=True):
        view.copy_(value)
        assert view.shape == value.shape
    assert int((flat != -1).sum()) == 31
    assert (flat[layout.length :] == -1).all()
    named = layout.named(flat)
    assert list(named) == list(given)
    assert all(torch.equal(named[name], value) for name, value in given.items())
    assert named["image"].stride() == (
        given["image"].stride() if options.get("strided") else (24, 12, 4, 1)
    )
    back = [torch.zeros_like(value) for value in given.values()]
    layout.write(flat, back)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, given.values(), strict=True))


def test_one_vector_for_each_dtype() -> None:
    values = [
        torch.ones(2, 2),
        torch.ones(3, dtype=torch.int64),
        torch.ones(()),
        torch.ones(4, 2).T,
    ]
    seen = []
    for flat in fused(values):
        seen.append((flat.dtype, len(flat)))
        flat.mul_(3)
    assert seen == [(torch.float32, 13), (torch.int64, 3)]
    assert all((value == 3).all() for value in values)
    assert (
        joined([torch.ones(2), torch.ones(1, dtype=torch.int64)], torch.float64).dtype
        == torch.float64
    )
