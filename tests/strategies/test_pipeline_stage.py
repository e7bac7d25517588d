"""What a stage holds, what passes between stages, and batches that are cut, without any process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from allhands import UserError
from allhands.models import GPT
from allhands.strategies.pipeline_parts import Part, chain_of
from allhands.strategies.pipeline_stage import Ghost, StagedModel, rows_of, signature, stage_module

CPU = torch.device("cpu")


def gpt_stages() -> tuple[nn.Module, list[list[Part]]]:
    model = GPT(11, 8, layers=3, heads=2, width=8, dropout=0.5)
    parts = chain_of(model)
    return model, [parts[:2], parts[2:3], parts[3:]]


def no_precision() -> Any:
    return torch.autocast("cpu", enabled=False)


def test_stages_hold_their_share_under_the_models_names_and_compute_it() -> None:
    model, stages = gpt_stages()
    model.eval()
    modules = [stage_module(model, parts, no_precision) for parts in stages]
    value = words = torch.randint(0, 11, (3, 8))
    for module in modules:
        value = module(value)
    assert torch.equal(value, model(words))
    assert isinstance(modules[0], GPT)
    named = dict(model.named_parameters(remove_duplicate=False))
    for module in modules:
        assert all(named[name] is parameter for name, parameter in module.named_parameters())
    first, last = (
        StagedModel(modules[:1], {}),
        StagedModel([modules[0], modules[2]], {"head.weight": "embed.weight"}),
    )
    assert [name for name, _ in first.named_parameters()][:3] == [
        "embed.weight",
        "position.weight",
        "layers.0.attn_norm.weight",
    ]
    assert {name for name, _ in last.named_parameters()} == {
        n for n in named if not n.startswith(("layers.1", "head"))
    }
    last.train()
    assert all(module.training for stage in (0, 2) for module in modules[stage].modules())
    assert not modules[1].training


def test_the_shapes_between_stages_are_known_without_running_them() -> None:
    model, stages = gpt_stages()
    ghost = Ghost(model, stages, CPU)
    before = torch.get_rng_state()
    shapes = ghost.between(torch.zeros(3, 5, dtype=torch.int64), training=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert [
        (list(shape.shape), shape.dtype, shape.is_meta, shape.requires_grad) for shape in shapes
    ] == [([3, 5, 8], torch.float32, True, True)] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            ghost.between(torch.zeros(3, 5, dtype=torch.int64), training=True)[0].dtype
            == torch.float32
        )  # a residual sum
    chain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    cut = Ghost(chain, [[part] for part in chain_of(chain)], CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert cut.between(torch.zeros(4, 2), training=True)[0].dtype == torch.bfloat16
    assert cut.between(torch.zeros(4, 2), training=True)[0].dtype == torch.float32


def test_a_staged_model_takes_one_input() -> None:
    staged = StagedModel([nn.Sequential(nn.Linear(1, 1))], {})
    staged.answer = lambda value: value
    assert staged(3) == 3
    with pytest.raises(
        UserError, match=r"called with its one input; handle_batch calls it with \(…, mask=…\)"
    ):
        staged(1, mask=2)


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


def test_batches_are_cut_by_samples() -> None:
    batch = {"pair": Pair(torch.arange(6).view(3, 2), ["a", "b", "c"]), "y": (torch.arange(3),)}
    cut = rows_of(batch, slice(1, 3), 3)
    assert cut["pair"].x.tolist() == [[2, 3], [4, 5]]
    assert cut["pair"].names == ["b", "c"]
    filled = rows_of(cut, torch.tensor([0, 1, 1]), 2)
    assert filled["pair"].x.tolist() == [[2, 3], [4, 5], [4, 5]]
    assert filled["pair"].names == ["b", "c", "c"]
    assert filled["y"][0].tolist() == [1, 2, 2]
    assert signature(filled) == signature(batch)
    assert signature(cut) != signature(batch)
    two_rows, no_rows = r"a tensor of shape \[2, 3\]", r"a tensor of shape \[\]"
    for wrong, said in ((torch.zeros(2, 3), two_rows), (torch.zeros(()), no_rows), (7, "a int")):
        with pytest.raises(UserError, match=f"each batch of 3 samples.*holds {said}"):
            rows_of((torch.zeros(3, 1), wrong), slice(0, 1), 3)
