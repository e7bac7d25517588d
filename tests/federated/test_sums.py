"""Sums of a cohort: the same bits in every order, at once or one by one."""

from __future__ import annotations

import pytest
import torch

from allhands.federated.sums import Sums, _summed

CPU = torch.device("cpu")


def sums(clients: int, length: int) -> Sums:
    return Sums({"update": length}, clients, ("loss",), 1 / clients, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_rows_summed_at_once_are_to_the_bit_those_added_one_by_one_in_any_order(dtype):
    drawn = torch.Generator().manual_seed(1)
    # of all magnitudes, halves of the grid and numbers that cancel included
    rows = torch.randn(9, 70_000, generator=drawn, dtype=torch.float64) * 10.0 ** torch.linspace(
        -16, 1, 70_000
    )
    rows[:, :5] = torch.tensor([0.5, 1.5, -2.5, 0.0, 3.0], dtype=torch.float64) * 9 * 2.0**-44
    rows[1] = -rows[0]
    rows = (rows * 3).round().to(dtype) if dtype == torch.int64 else rows.to(dtype)
    weights = torch.ones(9, dtype=torch.float64)
    weights[2:] = torch.rand(7, generator=drawn, dtype=torch.float64)
    one = sums(9, rows.shape[1])
    for place in torch.randperm(9, generator=drawn).tolist():
        one.add("update", rows[place : place + 1], weights[place : place + 1])
    several = sums(9, rows.shape[1])
    several.add("update", rows[:4], weights[:4])
    several.add("update", rows[4:], weights[4:])
    assert torch.equal(one.total("update"), several.total("update"))
    assert torch.equal(one.total("update"), _summed(rows, weights * (1 / 9)))
    assert one.weight("update") == several.weight("update")
    exact = (rows.to(torch.float64) * (weights * (1 / 9))[:, None]).sum(0)
    assert (one.total("update") - exact).abs().max() < 9 * 2.0**-44
