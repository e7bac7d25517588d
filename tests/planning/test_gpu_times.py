"""Operations as a GPU computes them, and their times."""

from __future__ import annotations

import pytest
import torch

from allhands.planning.gpu_times import call_on_gpu, largest_number, seconds_on_gpu, workspace_of
from allhands.planning.operation import Form, Operation
from allhands.planning.operation_times import OperationTimes, measured
from allhands.planning.plan import card_named

aten = torch.ops.aten


def test_attention_is_that_of_the_processor() -> None:
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, 8, 4) for _ in range(4))
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    output, sums = forward(q, k, v, 0.0, True)
    call = call_on_gpu(str(forward), (q, k, v, 0.0, True), {})
    assert call is not None
    torch.testing.assert_close(call(), output)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (gradient, q, k, v, output, sums, 0.0, True)
    call = call_on_gpu(str(back), args, {})
    assert call is not None
    for found, expected in zip(call(), back(*args), strict=True):
        torch.testing.assert_close(found, expected)


def test_batch_norm_is_that_of_the_processor() -> None:
    torch.manual_seed(0)
    given, gradient = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    weight, bias, mean, variance = torch.randn(3), torch.randn(3), torch.zeros(3), torch.ones(3)
    args = (given, weight, bias, mean, variance, True, 0.1, 1e-5)
    forward = aten.native_batch_norm.default
    output, saved, inverse = forward(*args)
    call = call_on_gpu(str(forward), args, {})
    assert call is not None
    torch.testing.assert_close(call(), output)
    back = aten.native_batch_norm_backward.default
    args = (gradient, given, weight, mean, variance, saved, inverse, True, 1e-5, [True] * 3)
    call = call_on_gpu(str(back), args, {})
    assert call is not None
    for found, expected in zip(call(), back(*args), strict=True):
        torch.testing.assert_close(found, expected)


def test_other_operations_are_the_same_there() -> None:
    assert call_on_gpu("aten.mm.default", (torch.ones(2, 2), torch.ones(2, 2)), {}) is None


def test_tokens_lie_all_over_an_embedding() -> None:
    weight, tokens = Form((7, 3), (3, 1), torch.float32), Form((2, 5), (5, 1), torch.int64)
    shapes = [weight.shape, tokens.shape]
    assert largest_number("aten.embedding.default", shapes, (weight, tokens)) == 7
    args = (weight, tokens, 7, -1, False)
    assert largest_number("aten.embedding_dense_backward.default", shapes, args) == 7
    one = Operation(
        "aten.embedding.default", 0, 0, 4, aten.embedding.default, ((weight, tokens), {})
    )
    found = measured(one, torch.device("cpu"))
    assert found is not None
    assert found[0] > 0


def test_an_expanded_tensor_is_measured() -> None:
    wide = Form((4, 6), (0, 1), torch.float32)
    one = Operation("aten.sum.default", 0, 0, 4, aten.sum.default, ((wide,), {}))
    times = OperationTimes(card_named("h100"), device=torch.device("cpu"))
    assert times(one) > 0
    assert not times.by_peaks


@pytest.mark.gpu
def test_a_product_on_a_gpu_takes_what_its_peak_says() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    seconds = seconds_on_gpu(lambda: a @ a, device)
    assert seconds < 0.01
    assert workspace_of(lambda: a + a, device) == 0
    q = torch.randn(2, 3, 64, 32, device=device, requires_grad=True)
    call = call_on_gpu(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        (torch.ones_like(q), q, q, q, q, q, 0.0, True),
        {},
    )
    assert call is not None
    assert seconds_on_gpu(call, device, captured=False) > 0
