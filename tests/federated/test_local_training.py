"""How clients' optimizers are made over flat vectors."""

from __future__ import annotations

import pytest
import torch

from allhands.federated.local_training import LocalOptimizer
from allhands.federated.row_layout import RowLayout


def made(kind: str, **options) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 2)
    local = LocalOptimizer.of(kind, model, **options)
    layout = RowLayout(model, local.groups)
    rows, gradients = torch.zeros(1, layout.length), torch.zeros(1, layout.trained)
    optimizer = local.make(layout, rows, gradients)
    local.set_rates(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "fused", "foreach"),
    [
        ("Adam", {}, True, None),
        ("AdamW", {}, True, None),
        ("SGD", {"lr": 0.1}, True, None),
        ("Adagrad", {}, None, False),
        ("Adam", {"foreach": True}, None, True),
        ("Adam", {"fused": False}, False, False),
        ("Adam", {"differentiable": True}, None, False),
    ],
)
def test_one_vector_is_updated_in_one_pass_where_the_user_leaves_it_open(
    kind, options, fused, foreach
):
    group = made(kind, **options).param_groups[0]
    assert (group["fused"], group["foreach"]) == (fused, foreach)


@pytest.mark.parametrize("kind", LocalOptimizer.FUSED)
def test_the_update_in_one_pass_gives_what_the_other_gives(kind):
    ways = []
    for options in ({}, {"foreach": False, "fused": False}):
        optimizer = made(kind, lr=0.1, weight_decay=0.01, **options)
        row = optimizer.param_groups[0]["params"][0]
        torch.manual_seed(0)
        for _ in range(5):
            row.grad.copy_(torch.randn(row.shape))
            optimizer.step()
        ways.append(row.detach().clone())
    assert torch.allclose(*ways, rtol=1e-5, atol=1e-6)
    assert ways[0].abs().max() > 0.01


@pytest.mark.parametrize(
    ("kind", "options", "plain"),
    [
        ("SGD", {"lr": 0.1}, True),
        ("SGD", {"lr": 0.1, "foreach": False}, True),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, False),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}, False),
        ("SGD", {"lr": 0.1, "maximize": True}, False),
        ("SGD", {"lr": 0.1, "fused": True}, False),
        ("SGD", {"lr": torch.tensor(0.1)}, False),
        ("Adam", {}, False),
    ],
)
def test_what_is_one_subtraction(kind, options, plain):
    assert LocalOptimizer.of(kind, torch.nn.Linear(3, 2), **options).plain is plain
