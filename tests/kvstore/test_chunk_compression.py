from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from allhands.comm.codecs import Codec, codec_from
from allhands.errors import UserError
from allhands.kvstore.chunk_compression import ChunkCompressor, both_ways

ALL: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "int8"},
    {"name": "2bit", "threshold": 0.5},
    {"name": "1bit"},
    {"name": "topk", "keep": 0.1},
]
COUNTS = [0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 1001, 2500]


def size_of(options: dict[str, Any], count: int) -> int:
    """Bytes of `count` numbers, by the words of the documentation."""
    return {
        "none": 4 * count,
        "fp16": 2 * count,
        "bf16": 2 * count,
        "int8": count + 4 * math.ceil(count / 1024),
        "2bit": 4 * math.ceil(count / 16),
        "1bit": 4 * math.ceil(count / 1024) + math.ceil(count / 8),
        "topk": 8 * min(count, max(1, math.ceil(0.1 * count))),
    }[options["name"]]


def named(options: dict[str, Any]) -> str:
    return options["name"]


def decoded(codec: Codec, data: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.full((count,), torch.nan)
    codec.decode(data, out)
    return out


@pytest.mark.parametrize("options", ALL, ids=named)
def test_sums_telescope_and_sizes_are_exact_for_every_count(options: dict[str, Any]) -> None:
    codec = codec_from(options)
    assert codec_from(codec.options).options == codec.options == options
    generator = torch.Generator().manual_seed(3)
    for count in COUNTS:
        compressor = ChunkCompressor(codec, count)
        given, received = (
            torch.zeros(count, dtype=torch.float64),
            torch.zeros(count, dtype=torch.float64),
        )
        for _ in range(50):
            values = torch.randn(count, generator=generator)
            kept = values.clone()
            data = compressor.compress(values)
            assert torch.equal(values, kept)
            assert data.dtype == torch.uint8
            assert data.shape == (codec.nbytes(count),) == (size_of(options, count),)
            given += values
            received += decoded(codec, data, count)
        assert torch.allclose(received, given - compressor.state(), rtol=1e-6, atol=1e-5)
        if options["name"] == "none":
            assert not compressor.state().any()


@pytest.mark.parametrize("options", ALL, ids=named)
def test_other_types_and_places_in_a_buffer_give_the_same_numbers(options: dict[str, Any]) -> None:
    codec = codec_from(options)
    values = torch.randn(37, generator=torch.Generator().manual_seed(4)).bfloat16()
    data = ChunkCompressor(codec, 37).compress(values)
    assert torch.equal(data, ChunkCompressor(codec, 37).compress(values.float()))
    frame = torch.zeros(len(data) + 3, dtype=torch.uint8)
    frame[3:] = data
    out = torch.zeros(40)
    codec.decode(frame[3:], out[2:39])
    assert torch.equal(out[2:39], decoded(codec, data, 37))
    narrow = torch.zeros(37, dtype=torch.bfloat16)
    codec.decode(data, narrow)
    assert torch.equal(narrow, decoded(codec, data, 37).bfloat16())


def model_of_two_bits(
    residual: np.ndarray, values: np.ndarray, threshold: float
) -> tuple[bytes, np.ndarray]:
    """MXNet's rule, one number after another."""
    out = bytearray(-(-len(values) // 16) * 4)
    numbers = np.zeros_like(residual)
    bound = np.float32(threshold)
    for place, value in enumerate(values):
        residual[place] += value
        if residual[place] >= bound:
            out[place // 4] |= (0xC0, 0x30, 0x0C, 0x03)[place % 4]
            residual[place] -= bound
            numbers[place] = bound
        elif residual[place] <= -bound:
            out[place // 4] |= (0x80, 0x20, 0x08, 0x02)[place % 4]
            residual[place] += bound
            numbers[place] = -bound
    return bytes(out), numbers


def test_two_bits_are_those_of_mxnet_exactly() -> None:
    generator = torch.Generator().manual_seed(5)
    for count in (1, 16, 21, 333):
        codec = codec_from({"name": "2bit", "threshold": 0.3})
        compressor, residual = ChunkCompressor(codec, count), np.zeros(count, np.float32)
        for _ in range(8):
            values = torch.randn(count, generator=generator) / 2
            values[0] = 0.3 - float(compressor.state()[0])  # at the bound, or a rounding beside it
            data, numbers = model_of_two_bits(residual, values.numpy(), 0.3)
            compressed = compressor.compress(values)
            assert bytes(compressed.tolist()) == data
            assert np.array_equal(decoded(codec, compressed, count).numpy(), numbers)
            assert np.array_equal(compressor.state().numpy(), residual)


def test_one_bit_is_signs_with_the_mean_size() -> None:
    codec = codec_from(both_ways({"type": "1bit", "threshold": 0})[0])
    data = codec.encode(torch.tensor([1.0, -2.0, 0.0, -0.5, 3.0, 1.0, -1.0, 1.0, -0.5]))
    scale = 10 / 9
    assert data[:4].view(torch.float32).item() == pytest.approx(scale)
    assert data[4:].tolist() == [0b10101101, 0b00000000]
    assert decoded(codec, data, 9).tolist() == pytest.approx(
        [scale * sign for sign in (1, -1, 1, -1, 1, 1, -1, 1, -1)]
    )


def test_topk_keeps_the_largest_exactly() -> None:
    codec = codec_from({"name": "topk", "keep": 0.25})
    values = torch.tensor([0.1, -5.0, 0.2, 4.0, -0.3, 0.0, 1.0, -1.5])
    assert decoded(codec, codec.encode(values), 8).tolist() == [0, -5.0, 0, 4.0, 0, 0, 0, 0]
    data = codec.encode(values)
    for wrong in (-1, 8):
        bad = data.clone()
        bad[:4] = torch.tensor([wrong], dtype=torch.int32).view(torch.uint8)
        with pytest.raises(UserError, match="there are 8 numbers"):
            codec.decode(bad, torch.zeros(8))


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_what_is_beyond_the_range_comes_later(kind: str, dtype: torch.dtype) -> None:
    codec, most = codec_from({"name": kind}), torch.finfo(dtype).max
    compressor = ChunkCompressor(codec, 2)
    beyond = torch.tensor([most * 2.5 if kind == "fp16" else torch.finfo(torch.float32).max, -1.0])
    sent = [
        decoded(codec, compressor.compress(values), 2)
        for values in (beyond, torch.zeros(2), torch.zeros(2), torch.zeros(2))
    ]
    assert sent[0].tolist() == [most, -1.0]
    assert all(one.isfinite().all() for one in sent)
    assert torch.stack(sent).double().sum(0).tolist() == pytest.approx(beyond.tolist(), rel=1e-6)


@pytest.mark.parametrize("options", ALL, ids=named)
def test_nan_and_infinity_raise_and_change_nothing(options: dict[str, Any]) -> None:
    compressor = ChunkCompressor(codec_from(options), 9)
    compressor.compress(torch.linspace(-1, 1, 9))
    residual = compressor.state().clone()
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.zeros(9)
        values[7] = bad
        with pytest.raises(UserError, match="1 of 9 values for 'fc.weight' are NaN or infinite"):
            compressor.compress(values, "fc.weight")
        assert torch.equal(compressor.state(), residual)
    twobit = ChunkCompressor(codec_from({"name": "2bit", "threshold": 0.5}), 1)
    twobit.compress(torch.tensor([3e38]))
    with pytest.raises(UserError, match="grew beyond float32"):
        twobit.compress(torch.tensor([3e38]))


def test_a_loaded_residual_goes_on_bit_for_bit() -> None:
    codec = codec_from({"name": "2bit", "threshold": 0.7})
    values = torch.randn(6, 50, generator=torch.Generator().manual_seed(6))
    whole = ChunkCompressor(codec, 50)
    expected = [whole.compress(one) for one in values]
    first, second = ChunkCompressor(codec, 50), ChunkCompressor(codec, 50)
    for one in values[:3]:
        first.compress(one)
    second.load(first.state())
    first.compress(values[3])
    assert all(
        torch.equal(second.compress(one), data)
        for one, data in zip(values[3:], expected[3:], strict=True)
    )
    with pytest.raises(UserError, match=r"residual of shape \[49\] for a chunk of 50"):
        second.load(torch.zeros(49))
    with pytest.raises(UserError, match=r"chunk for 'w' of shape \[49\]; it has 50"):
        second.compress(torch.zeros(49), "w")


def descended(options: dict[str, Any], feedback: bool, lr: float, steps: int = 600) -> float:
    """Mean squared distance to the solution of a least-squares problem of 40 numbers, from 1 at
    first."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(200, 40, generator=generator)
    inputs[:, :4] *= 4  # a few directions have most of the gradient
    solution = torch.ones(40)
    target = inputs @ solution + torch.randn(200, generator=generator)
    best = torch.linalg.lstsq(inputs, target[:, None]).solution[:, 0]
    weights, codec = torch.zeros(40), codec_from(options)
    compressor, out = ChunkCompressor(codec, 40), torch.empty(40)
    for _ in range(steps):
        grad = inputs.T @ (inputs @ weights - target) / len(inputs)
        if not feedback:
            compressor = ChunkCompressor(codec, 40)
        codec.decode(compressor.compress(grad), out)
        weights -= lr * out
    return float((weights - best).square().mean())


@pytest.mark.parametrize(
    ("options", "lr", "bound"),
    [
        ({"name": "none"}, 0.02, 1e-5),
        ({"name": "fp16"}, 0.02, 1e-5),
        ({"name": "bf16"}, 0.02, 1e-5),
        ({"name": "int8"}, 0.02, 1e-5),
        ({"name": "2bit", "threshold": 0.5}, 0.05, 1e-3),
        ({"name": "1bit"}, 0.02, 1e-5),
        ({"name": "topk", "keep": 0.025}, 0.02, 1e-5),  # one number of forty
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_training_converges_and_needs_the_feedback_where_much_is_left_out(
    options: dict[str, Any], lr: float, bound: float
) -> None:
    distance = descended(options, True, lr)
    assert distance < bound
    if options["name"] in ("2bit", "1bit", "topk"):
        assert descended(options, False, lr) > 100 * distance


@pytest.mark.parametrize("options", ALL, ids=named)
def test_data_of_another_size_are_refused(options: dict[str, Any]) -> None:
    codec = codec_from(options)
    for data in (
        torch.zeros(codec.nbytes(20) + 1, dtype=torch.uint8),
        torch.zeros(codec.nbytes(20), dtype=torch.int8),
    ):
        with pytest.raises(UserError, match="20 numbers are .* bytes"):
            codec.decode(data, torch.zeros(20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "write the name of a codec.*codecs are fp16, bf16"),
        ({"type": "2bits"}, "there is no codec '2bits'; did you mean '2bit'"),
        ({"type": 2}, "compress=2: write the name of a codec"),
        ("powersgd", "which only DDP has; write 'int8'"),
        ({"type": "2bit", "treshold": 1}, "no option 'treshold'; did you mean 'threshold'"),
        ({"type": "fp16", "threshold": 1}, "no option 'threshold'. Its options: none"),
        ({"type": "none", "threshold": 1}, "there is no codec 'none'"),
        ({"type": "2bit", "threshold": 0}, "threshold=0 of '2bit'; it must be a number above 0"),
        ({"type": "2bit", "threshold": math.nan}, "threshold=nan"),
        ({"type": "2bit", "threshold": math.inf}, "threshold=inf"),
        ({"type": "2bit", "threshold": "1"}, "threshold='1'"),
        ({"type": "1bit", "threshold": 0.5}, "'1bit' has no option 'threshold'"),
        (
            {"name": "topk", "keep": 1.5},
            "keep=1.5 of 'topk'; it must be a number above 0, at most 1",
        ),
        ({"name": "topk", "keep": True}, "keep=True"),
        ({"name": "fp16", "pull": "3bit"}, "there is no codec '3bit'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        both_ways(options)


@pytest.mark.parametrize(
    ("given", "push", "pull"),
    [
        ({"type": "2bit", "threshold": 0.3}, {"name": "2bit", "threshold": 0.3}, {"name": "none"}),
        ({"type": "2bit"}, {"name": "2bit", "threshold": 0.5}, {"name": "none"}),
        ("int8", {"name": "int8"}, {"name": "int8"}),
        ({"name": "topk", "pull": "fp16"}, {"name": "topk", "keep": 0.01}, {"name": "fp16"}),
        ({"type": "none", "pull": {"type": "1bit"}}, {"name": "none"}, {"name": "1bit"}),
    ],
)
def test_mxnets_words_and_ours_mean_the_same(
    given: Any, push: dict[str, Any], pull: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    assert both_ways(given) == (push, pull)
    assert both_ways({**push, "pull": pull}) == (push, pull)
    assert not recwarn


def test_the_old_name_of_keep_warns() -> None:
    with pytest.warns(FutureWarning, match="the option 'ratio' of 'topk'.*write 'keep'"):
        assert both_ways({"type": "topk", "ratio": 0.1})[0] == {"name": "topk", "keep": 0.1}
