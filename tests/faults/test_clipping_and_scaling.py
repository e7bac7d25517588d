"""Clipping of a share, clipping of scaled gradients, steps that only some ranks skip.

Kinds of fault: Lightning-AI/pytorch-lightning#9330 (clipped before unscaled), pytorch/pytorch#72548
(the norm of a share).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from allhands import DDP, Callback
from allhands.strategies import KVStore
from tests.faults.probes import Found, a_share, probe, probe_each, size, train
from tests.reference import Slope

pytestmark = pytest.mark.serial


@probe
def clipped() -> list[float]:
    """30 and -10 and 10: the mean is 10; every sample alone would be clipped before it is
    averaged."""
    found = []
    for bound in (4.0, 1.0, 100.0):
        for accumulate in (1, a_share(3)):
            model, x = Slope(), torch.tensor([30.0, -10.0, 10.0])
            train(model, (x, x), a_share(3) // accumulate, clip_norm=bound, accumulate=accumulate)
            found.append(-float(model.w.detach()))
    return found


def test_clipping_bounds_the_gradient_of_the_global_batch(found: Found) -> None:
    for values in found(clipped):
        assert values == pytest.approx([4.0, 4.0, 1.0, 1.0, 10.0, 10.0], rel=1e-5)


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of output times target, so that a sample's target is the gradient of its output."""
    return (output.squeeze(1).float() * target).mean()


class Scales(Callback):
    """The scale, and the weight, after each step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.scales.append(training.loop.precision.scaler.get_scale())
        self.weights.append(float(training.model.weight.detach()))


def fp16_run(target: torch.Tensor, **options: Any) -> dict[str, Any]:
    """One weight, at 0, that sees 6 samples in every step; SGD of lr 1."""
    model, seen = nn.Linear(1, 1, bias=False), Scales()
    nn.init.zeros_(model.weight)
    history = train(
        model,
        (torch.ones(6, 1), target),
        a_share(6),
        weighted,
        epochs=6,
        precision="fp16",
        callbacks=[seen],
        **options,
    )
    return {"scales": seen.scales, "weights": seen.weights, "losses": history["train"]["loss"]}


@probe
def scaled_and_clipped() -> dict[str, Any]:
    return fp16_run(torch.full((6,), 10.0), clip_norm=1.0)


def test_gradients_are_unscaled_before_they_are_clipped(found: Found) -> None:
    """The gradient is 10, the bound 1: each step that is taken is 1 long, whatever the scale."""
    for result in found(scaled_and_clipped):
        taken = [
            scale >= before
            for before, scale in zip([65536.0, *result["scales"]], result["scales"], strict=False)
        ]
        assert sum(taken) >= 2
        expected, weight = [], 0.0
        for step in taken:
            weight -= float(step)
            expected.append(weight)
        assert result["weights"] == pytest.approx(expected, rel=1e-3)


@probe
def overflow_on_one_rank() -> dict[str, Any]:
    """Only the last sample's gradient is too large for fp16 with the first scale; its rank is the
    last one."""
    return fp16_run(torch.tensor([0.125] * 5 + [12.0]))


def test_an_overflow_on_one_rank_is_skipped_by_all_and_is_no_error(found: Found) -> None:
    ranks = found(overflow_on_one_rank)
    assert all(result == ranks[0] for result in ranks)
    scales, weights = ranks[0]["scales"], ranks[0]["weights"]
    assert scales[0] == 32768.0, "the first step must overflow"
    assert weights[0] == 0.0
    assert scales[-1] == scales[-2], "later steps must not overflow"
    # A single process that skips the same steps: the gradient is the targets' mean.
    expected, weight = [], 0.0
    for before, scale in zip([65536.0, *scales], scales, strict=False):
        weight -= (0.125 * 5 + 12.0) / 6 if scale >= before else 0.0
        expected.append(weight)
    assert weights == pytest.approx(expected, rel=2e-3)
    assert weights[-1] < 0
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])


TARGETS = {
    "none": [0.125] * 5
    + [4.0],  # 65536 * 4 / 6 is the largest gradient; times the workers, it would be too large
    "last": [0.125] * 5 + [12.0],
    "first": [-40.0] + [0.5] * 5,
}
STRATEGIES = {
    "ddp": DDP,
    "unused": lambda: DDP(find_unused_parameters=True),
    "kvstore": lambda: KVStore(update="worker"),
}


def scales_by_hand(target: torch.Tensor) -> list[float]:
    """What torch's own loop in one process has after each of 6 steps."""
    model, scaler, scales = nn.Linear(1, 1, bias=False), torch.amp.GradScaler("cpu"), []
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = weighted(model(torch.ones(6, 1)), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@probe_each(f"{targets} {strategy}" for targets in TARGETS for strategy in STRATEGIES)
def scales(case: str) -> dict[str, Any]:
    targets, strategy = case.split()
    return fp16_run(torch.tensor(TARGETS[targets]), strategy=STRATEGIES[strategy]())


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_scale_is_that_of_one_process(found: Found, targets: str, strategy: str) -> None:
    expected = scales_by_hand(torch.tensor(TARGETS[targets]))
    assert (expected[0] < 65536) == (targets != "none")
    for result in found(scales, f"{targets} {strategy}"):
        assert result["scales"] == expected
        taken = sum(
            scale >= before for before, scale in zip([65536.0, *expected], expected, strict=False)
        )
        mean = sum(TARGETS[targets]) / 6
        assert result["weights"][-1] == pytest.approx(-taken * mean, rel=2e-3)


@probe
def idle_rank_in_fp16() -> list[float]:
    """The second step of each epoch has one sample, so that some ranks have none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    n = 2 * size() + 1
    train(model, (torch.ones(n, 1), torch.full((n,), 0.25)), 2, weighted, precision="fp16")
    return [float(model.weight.detach())]


def test_ranks_without_a_sample_follow_the_scaler(found: Found) -> None:
    assert found(idle_rank_in_fp16) == [[pytest.approx(-0.5, rel=1e-3)]] * found.workers
