"""Numbers beside axes, and what is shown of them."""

from __future__ import annotations

import pytest

from allhands.report.metric_plot import tick_labels, ticks, value_bounds


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "found"),
    [
        (0.0, 1.0, 7, False, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.3, 0.31, 7, False, [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3]),
        (0.5, 8.5, 6, True, [2, 4, 6, 8]),
        (0.5, 3.5, 6, True, [1, 2, 3]),
        (0.0, 14.0, 6, True, [0, 5, 10]),  # and not by 2.5
        (0.0, 1e6, 6, True, [0, 2e5, 4e5, 6e5, 8e5, 1e6]),
        (2.1e-6, 2.9e-6, 7, False, [2.2e-6, 2.4e-6, 2.6e-6, 2.8e-6]),
    ],
)
def test_ticks_are_round_evenly_spaced_and_within(low, high, most, whole, found):
    assert ticks(low, high, most, whole) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "texts", "common"),
    [
        ([0.0, 0.5, 1.0], ["0.0", "0.5", "1.0"], ""),
        ([-0.25, 0.0, 0.25], ["\N{MINUS SIGN}0.25", "0.00", "0.25"], ""),
        ([2e-6, 4e-6], ["2", "4"], "1e-6"),
        ([5.000e6, 5.002e6], ["5.000", "5.002"], "1e6"),
        ([0.98765, 0.9876502], ["0", "2"], "1e-7 +0.98765"),
        ([7.0], ["7"], ""),
    ],
)
def test_numbers_beside_an_axis_are_short_and_tell_the_values(values, texts, common):
    assert tick_labels(values) == (texts, common)


def test_an_axis_of_values_begins_at_zero_where_that_hides_nothing():
    assert value_bounds([0.1, 1.0]) == (0.0, pytest.approx(1.045))
    assert value_bounds([0.9, 1.0]) == pytest.approx((0.895, 1.005))
    assert value_bounds([-1.0, 5.0]) == pytest.approx((-1.3, 5.3))
    assert value_bounds([2.0, 2.0]) == pytest.approx((1.9, 2.1))
    assert value_bounds([0.0])[0] < 0 < value_bounds([0.0])[1]
    assert value_bounds([]) == (0.0, 1.0)
