"""Windows of accumulated micro-batches: the short last one, their number, epochs, ranks that have
fewer.

Kinds of fault: Lightning-AI/pytorch-lightning#19987 (the short window divided by the full one, or
dropped),
huggingface/accelerate#1624 (windows and epochs), pytorch/pytorch#44425 (uneven ranks while
accumulating).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.probes import Found, probe, size, slope_after, sum_of_means, train
from tests.reference import Slope, global_batches, relative_difference, train_by_hand
from tests.worlds import in_world

pytestmark = pytest.mark.serial

SIZES = (1, 2, 4, 5, 7, 9, 10, 12, 13)


def windows() -> dict[str, float]:
    """-w for data sets of several sizes in batches of 1, two and three of which make a step."""
    return {
        f"{n}/{window}": slope_after(n, 1, accumulate=window) for n in SIZES for window in (2, 3)
    }


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.rare
def test_a_short_last_window_is_the_mean_of_what_it_holds(found: Found, window: int) -> None:
    if window == 2:  # by hand: 1.5 + 3.5 + 5 and 2.5 + 6.5 + 9.5
        assert sum_of_means(5, 2) == 10.0
        assert sum_of_means(10, 4) == 18.5
    for values in in_world(found.workers, windows):
        for n in SIZES:
            assert values[f"{n}/{window}"] == pytest.approx(
                sum_of_means(n, window * found.workers)
            ), n


@probe
def longer_than_the_epoch() -> float:
    return slope_after(5, 1, accumulate=8)


def test_a_window_longer_than_the_epoch_is_one_step(found: Found) -> None:
    assert found(longer_than_the_epoch) == pytest.approx([3.0] * found.workers)


@probe
def steps_promised() -> list[int]:
    """3 batches a rank and epoch, windows of 2, 4 epochs."""
    x = torch.ones(3 * size())
    return train(Slope(), (x, x), 1, accumulate=2, epochs=4)["step"]


def test_windows_end_with_the_epoch(found: Found) -> None:
    assert found(steps_promised) == [[2, 4, 6, 8]] * found.workers


def noisy() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(29, 4, generator=generator), torch.randint(0, 3, (29,), generator=generator)


def network() -> nn.Module:
    torch.default_generator.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@probe
def adam() -> dict[str, Any]:
    """Global batches of 24 as one micro-batch a rank, and as several."""
    results = {}
    for accumulate in (1, 2, 4):
        model = network()
        train(
            model,
            noisy(),
            24 // (size() * accumulate),
            nn.CrossEntropyLoss(),
            epochs=3,
            accumulate=accumulate,
            clip_norm=0.5,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        )
        results[str(accumulate)] = model.state_dict()
    return results


def test_adam_with_clipping_does_not_see_how_the_global_batch_was_cut(found: Found) -> None:
    model = network()
    batches = global_batches(29, 24, seed=0, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train_by_hand(model, nn.CrossEntropyLoss(), optimizer, noisy(), batches, 6, clip_norm=0.5)
    for results in found(adam):
        for weights in results.values():
            assert relative_difference(weights, model.state_dict()) < 1e-4
