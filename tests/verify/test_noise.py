"""What counts as rounding: the judgement, on numbers made up for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from allhands.verify.noise import FACTOR, Noise, judge, nearest
from allhands.verify.recorder import ALL_GRADIENTS, ALL_PARAMETERS
from allhands.verify.runs import floor_of
from allhands.verify.traces import Trace


def step(
    loss: float = 0.0, gradient: float = 0.0, parameter: float = 0.0, **changes: Any
) -> dict[str, Any]:
    distance = {
        "loss": loss,
        "gradient of w": gradient,
        ALL_GRADIENTS: gradient,
        "parameter w": parameter,
        ALL_PARAMETERS: parameter,
    }
    known = {
        "optimizer": "",
        "number": 1,
        "samples": 8,
        "content": 5,
        "shares": [4, 4],
        "rates": [0.1],
        "apart": {"parameters": [], "buffers": []},
    }
    return known | {"distance": distance} | changes


REFERENCE = Trace([step(), step(), step()])


def judged(*steps: dict[str, Any], noise: Noise | None = None, exact: bool = True) -> Any:
    return judge(Trace(list(steps)), REFERENCE, noise or Noise(1e-6), exact)


def test_the_floor_is_a_few_units_in_the_last_place() -> None:
    assert floor_of(torch.nn.Linear(1, 1)) == pytest.approx(4 * 2**-23)
    assert floor_of(torch.nn.Linear(1, 1).double()) == pytest.approx(4 * 2**-52)


def test_noise_is_the_largest_so_far_of_all_runs() -> None:
    noise = Noise(1e-6)
    noise.add(Trace([step(loss=3e-6), step(loss=1e-6), step(loss=9e-6)]))
    noise.add(Trace([step(loss=2e-6), step(loss=4e-6), step(loss=1e-6)]))
    assert [noise.at(number, "loss") for number in range(4)] == [3e-6, 4e-6, 9e-6, 9e-6]
    assert noise.at(0, "gradient of w") == 1e-6


def test_one_quantity_is_not_held_to_a_chance_agreement() -> None:
    noise = Noise(1e-6)
    noise.add(Trace([step(loss=0.0, gradient=2e-5, parameter=1e-5)]))
    assert noise.at(0, "loss") == 2e-5
    assert noise.at(0, "gradient of other") == 2e-5
    assert noise.at(0, "parameter other") == 1e-5
    assert noise.at(0, "buffer b") == 2e-5


def test_a_parameter_that_is_all_noise_does_not_hide_a_fault_in_the_others() -> None:
    noise, run = Noise(1e-6), step(gradient=1e-6, parameter=1e-6)
    run["distance"] |= {
        "gradient of v": 1e-6,
        "gradient of key": 1.4,
        "parameter v": 1e-6,
        "parameter key": 1.4,
        ALL_PARAMETERS: 0.3,
    }
    noise.add(Trace([run]))
    assert [noise.at(0, name) for name in ("loss", "gradient of w", "parameter w")] == [1e-6] * 3
    assert noise.at(0, "parameter key") == 1.4


def test_differences_beyond_the_factor_are_found_where_they_begin() -> None:
    limit = FACTOR * 1e-6
    assert judged(step(gradient=0.9 * limit), step(), step(parameter=0.9 * limit)) is None
    found = judged(
        step(gradient=0.9 * limit), step(gradient=1.1 * limit, parameter=1.0), step(loss=1.0)
    )
    assert (found.step, found.what, found.kind, found.names) == (
        2,
        "gradient of w",
        "rounding",
        ["w"],
    )
    assert found.times == pytest.approx(22)


def test_what_is_not_a_number_differs() -> None:
    assert judged(step(loss=math.nan), step(), step()).what == "loss"
    assert judged(step(gradient=math.inf), step(), step()).what == "gradient of w"


@pytest.mark.parametrize(
    ("changes", "what", "difference"),
    [
        ({"samples": 9, "content": 6}, "number of samples", 1),
        ({"content": 6}, "samples", math.nan),
        ({"rates": [0.11]}, "learning rate", 0.01),
        ({"apart": {"parameters": ["w"], "buffers": []}}, "parameter w between ranks", math.nan),
        ({"apart": {"parameters": [], "buffers": ["b"]}}, "buffer b between ranks", math.nan),
    ],
)
def test_what_must_be_equal(changes: dict[str, Any], what: str, difference: float) -> None:
    found = judged(step(), step(**changes), step())
    assert (found.step, found.what) == (2, what)
    assert found.difference == pytest.approx(difference, nan_ok=True)


def test_samples_that_cannot_be_told_apart_are_not_compared() -> None:
    assert judged(step(content=None, samples=0), step(), step()) is None
    # Padded to the longest of their batch, they look otherwise in another one.
    assert judged(step(content=6, form=-1.0), step(), step()) is None
    assert judged(step(content=6, form=7.0), step(), step()) is None
    padded = Trace([step(form=-1.0)])
    assert judge(Trace([step(form=-1.0, content=6)]), padded, Noise(1e-6)) is None
    assert judge(Trace([step(form=-1.0, samples=9)]), padded, Noise(1e-6)).what == (
        "number of samples"
    )


def test_causes_come_before_what_follows_from_them() -> None:
    assert judged(step(loss=1.0, gradient=1.0, parameter=1.0, rates=[0.2])).what == "learning rate"
    assert (
        judged(step(gradient=1.0, parameter=1.0, apart={"parameters": ["w"], "buffers": []})).what
        == "gradient of w"
    )


def test_another_number_of_steps() -> None:
    found = judged(step(), step())
    assert (found.step, found.what, found.difference) == (3, "number of optimizer steps", 1)


def test_a_lossy_strategy_is_held_to_samples_and_learning_rates_only() -> None:
    apart = {"parameters": ["w"], "buffers": []}
    assert judged(step(loss=1.0, apart=apart), step(), step(), exact=False) is None
    assert judged(step(content=6), step(), step(), exact=False).what == "samples"


def test_the_nearest_is_the_largest_multiple_of_its_noise() -> None:
    assert nearest(Trace([step(), step()]), Noise(1e-6)) is None
    found = nearest(Trace([step(loss=2e-6), step(gradient=3e-6)]), Noise(1e-6))
    assert found is not None
    assert (found.step, found.what, found.times) == (2, "gradient of w", pytest.approx(3))
