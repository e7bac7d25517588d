"""One step on tiny numbers: loss = mean(w * x) with w = 0 and SGD(lr=1), so that -w after a step is
its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allhands import UserError, World
from allhands.step import LossRule, OptimizerStep, Precision
from allhands.step.exchange import Exchange, Placement
from allhands.step.update import update_function
from tests.reference import Slope, mean_output

ALONE = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")


def step_for(
    model: nn.Module, criterion: Any = mean_output, precision: str = "fp32", **options: Any
) -> OptimizerStep:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=1.0)
    return OptimizerStep(
        model.parameters(),
        optimizer,
        LossRule(criterion),
        Placement(model, ALONE),
        Exchange(),
        ALONE,
        Precision(precision, ALONE.device),
        lambda batch: (model(batch), batch),
        lambda *result: None,
        lambda batch: batch,
        **options,
    )


def gradient_of(batches: list[list[float]], **options: Any) -> float:
    model = Slope()
    rows = [torch.tensor(batch) for batch in batches]
    step_for(model, **options)(
        rows, [len(row) for row in rows], sum(len(row) for row in rows), False
    )
    return -float(model.w.detach())


def test_uneven_micro_batches_weigh_by_samples() -> None:
    assert gradient_of([[1.0, 2.0, 3.0], [8.0]]) == pytest.approx(3.5)


def test_a_summing_criterion_is_not_divided() -> None:
    class Sum(nn.Module):
        reduction = "sum"

        def forward(self, output: torch.Tensor, target: Any) -> torch.Tensor:
            return output.sum()

    assert gradient_of([[1.0, 2.0, 3.0], [8.0]], criterion=Sum()) == pytest.approx(14.0)


def test_clipping_bounds_the_whole_gradient() -> None:
    assert gradient_of([[100.0], [300.0]], clip_norm=1.0) == pytest.approx(1.0, rel=1e-5)


def test_fp16_gradients_are_unscaled_before_clipping() -> None:
    assert gradient_of([[10.0]], precision="fp16", clip_norm=1.0) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_reaches_the_forward_pass(precision: str) -> None:
    model, seen = nn.Linear(2, 2), []
    step = step_for(model, precision=precision)
    step.observe = lambda output, *rest: seen.append(output.dtype)
    step([torch.rand(3, 2)], [3], 3, False)
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert model.weight.dtype == torch.float32


def test_a_frozen_parameter_loses_its_last_gradient() -> None:
    """The optimizer would apply it again in every step: it skips parameters without a gradient, not
    frozen ones."""
    model = nn.Linear(2, 2)
    model(torch.rand(3, 2)).sum().backward()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    step_for(model)([torch.rand(3, 2)], [3], 3, False)
    assert torch.equal(model.bias, before)


def test_precision_is_checked() -> None:
    with pytest.raises(UserError, match="precision='fp23'; it must be one of"):
        Precision("fp23", ALONE.device)


def adam_run(direct: bool) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    update = update_function(optimizer) if direct else optimizer.step
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        update()
    return model.weight.detach(), optimizer


def test_the_direct_update_is_the_optimizers_own() -> None:
    assert torch.equal(adam_run(True)[0], adam_run(False)[0])


def test_step_hooks_are_called_whenever_they_are_registered() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    update, calls = update_function(optimizer), []
    update()
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    update()
    handle.remove()
    update()
    assert calls == ["post"]


def test_a_replaced_step_is_called() -> None:
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), []
    optimizer.step = lambda: calls.append("mine")  # type: ignore[assignment, method-assign]
    update_function(optimizer)()
    assert calls == ["mine"]


def test_a_profiler_sees_the_optimizers_label() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    update = update_function(torch.optim.SGD([parameter], lr=0.1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update()
    assert any("Optimizer.step#SGD" in event.key for event in profile.key_averages())
