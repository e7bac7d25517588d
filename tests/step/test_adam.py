"""The shorter step of Adam gives what PyTorch's own gives, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from allhands.step import adam
from allhands.step.update import update_function

PLAIN: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "with decay": {"weight_decay": 0.1},
    "whole numbers": {"lr": 1, "weight_decay": 0, "betas": (0.0, 0.99)},
}
OTHER: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": False},
    "differentiable": {"differentiable": True},
    "rate as a tensor": {"lr": torch.tensor(0.01)},
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def trained(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    shorter: bool,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Weights and state after some steps, in which one parameter has no gradient at times."""
    drawn = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in ((7, 5), (3,), ())
    ]
    options = copy.deepcopy(options)
    optimizer: Any = kind(  # type: ignore[call-arg]
        [{"params": weights[:2]}, {"params": weights[2:], "eps": 1e-3}], **options
    )
    update = update_function(optimizer) if shorter else optimizer.step
    for number in range(6):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=drawn).to(dtype)
        if number in (0, 3):
            weights[1].grad = None
        update()
        if number == 4 and not isinstance(options.get("lr"), torch.Tensor):
            optimizer.param_groups[0]["lr"] *= 0.5
    state = optimizer.state_dict()["state"]
    return [
        *(weight.detach() for weight in weights),
        *(value for one in state.values() for value in one.values()),
    ]


def assert_same(kind: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    own, theirs = (trained(kind, options, shorter, dtype) for shorter in (True, False))
    # Numbers of fp16 that are too small for it give not-a-number in both.
    torch.testing.assert_close(own, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_shorter_step_is_the_same_to_the_bit(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, of_group = [], adam._update
    monkeypatch.setattr(
        adam, "_update", lambda group, places: taken.append(1) or of_group(group, places)
    )
    assert_same(kind, options, dtype)
    assert len(taken) == 2 * 4  # the first step makes the state, the second that of one parameter


@pytest.mark.parametrize("options", OTHER.values(), ids=OTHER)
def test_other_options_are_computed_by_pytorch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "_update", None)
    try:
        theirs = trained(torch.optim.Adam, options, False)
    except (AssertionError, RuntimeError) as error:
        with pytest.raises(type(error)):
            trained(torch.optim.Adam, options, True)
        return
    own = trained(torch.optim.Adam, options, True)
    torch.testing.assert_close(own, theirs, rtol=0, atol=0)


def test_complex_weights_and_subclasses_are_computed_by_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(nn.Parameter):
        pass

    monkeypatch.setattr(adam, "_update", None)
    for weight in (nn.Parameter(torch.ones(2, dtype=torch.complex64)), Named(torch.ones(2))):
        update = update_function(torch.optim.Adam([weight]))
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            update()


def test_a_sparse_gradient_is_refused_as_pytorch_refuses_it() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    update = update_function(torch.optim.Adam([weight]))
    weight.grad = torch.ones(2, 2)
    update()
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        update()
