from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.models import (
    GPT,
    MLP,
    NextToken,
    ResNet18,
    SimpleCNN,
    build,
    gpt,
    mlp,
    names,
    resnet18,
    simple_cnn,
)
from allhands.step.loss import LossRule

# name, options, shape of a batch of four, shape of the output, parameters counted by hand
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], int]] = [
    (
        "mlp",
        {"in_features": 10, "hidden": (7, 5), "out_features": 3},
        (4, 10),
        (4, 3),
        10 * 7 + 7 + 7 * 5 + 5 + 5 * 3 + 3,
    ),
    ("mlp", {"in_features": 64, "hidden": (), "out_features": 10}, (4, 1, 8, 8), (4, 10), 650),
    ("simple_cnn", {}, (4, 1, 8, 8), (4, 10), 320 + 18_496 + 64 * 4 * 10 + 10),
    (
        "simple_cnn",
        {"image_size": 28},
        (4, 1, 28, 28),
        (4, 10),
        320 + 18_496 + 73_856 + 128 * 9 * 10 + 10,
    ),
    (
        "simple_cnn",
        {"in_channels": 3, "num_classes": 100, "image_size": 32},
        (4, 3, 32, 32),
        (4, 100),
        896 + 18_496 + 73_856 + 128 * 16 * 100 + 100,
    ),
    ("resnet18", {}, (4, 3, 32, 32), (4, 10), 11_173_962),  # the published count for CIFAR-10
    (
        "resnet18",
        {"norm": "group", "num_classes": 100},
        (4, 3, 32, 32),
        (4, 100),
        11_173_962 + 513 * 90,
    ),
    (
        "gpt",
        {"vocab_size": 65, "block_size": 16, "layers": 2, "heads": 2, "width": 32},
        (4, 16),
        (4, 16, 65),
        65 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64,
    ),
    (
        "gpt",
        {"vocab_size": 65, "block_size": 16, "layers": 1, "heads": 2, "width": 32, "tied": False},
        (4, 9),
        (4, 9, 65),
        2 * 65 * 32 + 16 * 32 + 12 * 32 * 32 + 13 * 32 + 64,
    ),
]
IDS = [f"{name}-{number}" for number, (name, *_) in enumerate(CASES)]


def batch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(65, shape) if name == "gpt" else torch.randn(shape)


@pytest.mark.parametrize(("name", "options", "shape", "out", "parameters"), CASES, ids=IDS)
def test_shapes_and_parameters(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    out: tuple[int, ...],
    parameters: int,
) -> None:
    model = build(name, **options)
    assert model(batch(name, shape)).shape == out
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("name", "options", "shape", "out", "parameters"), CASES, ids=IDS)
def test_the_seed_decides_the_weights(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    out: tuple[int, ...],
    parameters: int,
) -> None:
    torch.manual_seed(1)
    first = build(name, **options).state_dict()
    torch.manual_seed(1)
    again = build(name, **options).state_dict()
    other = build(name, **options).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {"in_features": 64}, (16, 1, 8, 8)),
        ("simple_cnn", {}, (16, 1, 8, 8)),
        ("resnet18", {"width": 8}, (8, 3, 32, 32)),
        ("resnet18", {"norm": "group", "width": 32}, (8, 3, 32, 32)),
        ("gpt", {"block_size": 16, "layers": 2, "width": 32}, (8, 16)),
    ],
)
def test_a_few_steps_reduce_the_loss(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = build(name, **options)
    x = batch(name, shape)
    target = x.roll(-1, 1) if name == "gpt" else torch.arange(len(x)) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gpt_sees_no_later_token() -> None:
    model = gpt(vocab_size=11, block_size=8, layers=2, heads=2, width=16).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt_names_and_tied_weights() -> None:
    tied = gpt(layers=1)
    assert tied.head.weight is tied.embed.weight
    assert gpt(tied=False).head.weight is not gpt(tied=False).embed.weight
    modules = dict(tied.named_modules())
    for name in (
        "embed",
        "layers.0.attn.qkv",
        "layers.0.attn.out",
        "layers.0.mlp.up",
        "layers.0.mlp.down",
        "norm",
        "head",
    ):
        assert name in modules


def test_group_norm_does_not_mix_samples() -> None:
    model = resnet18(norm="group", width=32).train()
    x = torch.randn(4, 3, 32, 32)
    assert torch.allclose(model(x)[:2], model(x[:2]), atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_names() -> None:
    assert names() == ("mlp", "simple_cnn", "resnet18", "gpt")
    assert (mlp, simple_cnn, resnet18, gpt) == (MLP, SimpleCNN, ResNet18, GPT)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet-18", {}, "there are mlp, simple_cnn, resnet18, gpt; did you mean 'resnet18'"),
        ("vit", {}, "no model 'vit'"),
        ("simple_cnn", {"num_class": 3}, "no option 'num_class'.*did you mean 'num_classes'"),
        ("mlp", {}, "needs in_features="),
        ("mlp", {"in_features": 3, "hidden": (4, 0)}, r"hidden\[1\]=0 must be at least 1"),
        ("simple_cnn", {"image_size": 3}, "image_size=3 must be at least 4"),
        ("resnet18", {"norm": "layer"}, "norm='layer' must be 'batch' or 'group'"),
        ("resnet18", {"norm": "group", "width": 48}, "width=48 must be a multiple of 32"),
        (
            "gpt",
            {"width": 30, "heads": 4},
            "width=30 must be a multiple of heads=4, for example 32",
        ),
        ("gpt", {"dropout": 1.0}, r"dropout=1\.0"),
    ],
)
def test_wrong_arguments(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, **options)


def test_gpt_refuses_a_longer_sample() -> None:
    with pytest.raises(
        UserError, match="9 tokens in a sample, but this GPT was made with block_size=8"
    ):
        gpt(block_size=8)(torch.zeros(1, 9, dtype=torch.int64))


def test_next_token_is_the_mean_over_the_tokens_that_count() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 3, 5), torch.tensor([[1, 4, 0], [2, -100, 3]])
    by_hand = (
        -logits.log_softmax(-1)[tokens >= 0].gather(1, tokens[tokens >= 0].unsqueeze(1)).mean()
    )
    torch.testing.assert_close(NextToken()(logits, tokens), by_hand)
    torch.testing.assert_close(NextToken(reduction="sum")(logits, tokens), 5 * by_hand)
    rule = LossRule(NextToken())
    assert rule.counts_targets
    assert rule.count_targets([tokens]).tolist() == [5.0]
    rule.check_counts(logits, tokens, rule.call(logits, tokens))


def test_next_token_refuses_samples_and_positions_in_another_order() -> None:
    with pytest.raises(UserError, match=r"gave \[3, 2, 5\] for a target of \[2, 3\]"):
        NextToken()(torch.randn(3, 2, 5), torch.zeros(2, 3, dtype=torch.int64))
