"""Which modules a plan splits, and what it refuses, with names and numbers; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allhands import UserError
from allhands.models import GPT, MLP
from allhands.strategies.tensor_plan import Style, check_plan, resolve


def gpt(**options: Any) -> GPT:
    return GPT(
        **({"vocab_size": 37, "block_size": 8, "layers": 2, "heads": 6, "width": 24} | options)
    )


def styles(
    model: nn.Module, plan: Any = None, tp: int = 2, sequence: bool = False, loss: bool = False
) -> dict[str, Style]:
    return resolve(model, plan, tp, sequence, loss)


class Pair(nn.Module):
    """Two Linear modules under names that a test chooses."""

    def __init__(self, up: str = "up", wide: int = 8, norm: bool = False) -> None:
        super().__init__()
        self.add_module(up, nn.Linear(4, wide))
        self.down = nn.Linear(wide, 4)
        if norm:
            self.norm = nn.LayerNorm(4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


def test_the_plan_of_the_gpt_is_taken_by_itself() -> None:
    found = styles(gpt())
    assert found["embed"] == found["head"] == Style("vocab")
    assert found["layers.1.attn.qkv"] == Style("colwise", parts=3, heads=6)
    assert found["layers.0.attn.out"] == found["layers.1.mlp.down"] == Style("rowwise")
    assert "norm" not in found
    assert found == styles(gpt(), "gpt")


def test_sequence_parallel_adds_norms_and_dropouts() -> None:
    added = set(styles(gpt(), sequence=True)) - set(styles(gpt()))
    per_layer = {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("attn_norm", "mlp_norm", "dropout")
    }
    assert added == per_layer | {"dropout", "norm"}


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [((), ["vocab"]), ((12,), ["colwise", "rowwise"]), ((12, 24), ["colwise", "rowwise", "vocab"])],
)
def test_the_plan_of_the_mlp_pairs_its_layers(hidden: tuple[int, ...], expected: list[str]) -> None:
    found = styles(MLP(6, hidden, 10))
    assert [found[f"layers.{i}"].kind for i in range(len(expected))] == expected


def test_a_plan_of_names_splits_the_gpts_qkv_by_heads() -> None:
    plan = {
        "layers.*.attn.qkv": "colwise",
        "layers.*.attn.out": "rowwise",
        "embed": "vocab",
        "head": "vocab",
    }
    assert styles(gpt(), plan)["layers.0.attn.qkv"] == Style("colwise", parts=3, heads=6)


def test_vocabularies_of_any_size_are_split() -> None:
    for tp in (2, 3, 4):
        assert styles(gpt(vocab_size=2003, heads=12), tp=tp)["embed"].kind == "vocab"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("gtp", r"plan='gtp'\): there is no such plan; did you mean 'gpt'\? Known are gpt, mlp"),
        ({}, "it must be a name"),
        ({"up": "columnwise"}, "there is no such style; did you mean 'colwise'"),
        ({"up": 3}, "a style is one of 'colwise', 'rowwise'"),
        ({"up": {"style": "rowwise", "parts": 3}}, "'rowwise' has no option 'parts'"),
        (
            {"up": {"style": "colwise", "parts": 0}},
            "parts=0; it must be a whole number of at least 1",
        ),
    ],
)
def test_what_no_model_could_be_split_by_is_refused_at_once(plan: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_plan(plan)


@pytest.mark.parametrize(
    ("model", "plan", "tp", "message"),
    [
        (
            Pair(),
            None,
            2,
            r"has no plan for a Pair; write one, such as Tensor\(plan=\{'up': 'colwise', 'down': "
            r"'rowwise'",
        ),
        (Pair(), "gpt", 2, "is for allhands.models.GPT, and the model is a Pair"),
        (
            Pair(),
            {"u": "colwise"},
            2,
            r"'u'.*names nothing in .* did you mean 'up'\? Its modules with weights are up, down",
        ),
        (gpt(), {"layers.*.qkv": "colwise"}, 2, "names nothing in the model"),
        (
            gpt(),
            {"layers.*.attn": "colwise"},
            2,
            r"\(Attention\): 'colwise' splits .*layers\.0\.attn\.qkv, ",
        ),
        (
            gpt(),
            {"layers.*.mlp.up": "colwise", "layers.0.mlp.*": "rowwise"},
            2,
            r"'layers\.\*\.mlp\.up' makes .* do not overlap",
        ),
        (Pair(norm=True), {"norm": "vocab"}, 2, r"\(LayerNorm\): 'vocab' splits"),
        (Pair(norm=True), {"norm": "replicate"}, 2, "splits no module"),
        (
            Pair(norm=True),
            {"up": "colwise", "down": "rowwise", "norm": "sequence"},
            2,
            "set that, or write 'replicate'",
        ),
        (
            Pair(wide=9),
            {"up": "colwise", "down": "rowwise"},
            2,
            "tp=2 does not divide its 9 outputs; set tp to one of 1, 3, 9",
        ),
        (
            Pair(wide=9),
            {"down": "rowwise"},
            2,
            "'down' is rowwise, and tp=2 does not divide its 9 inputs",
        ),
        (
            Pair(wide=12),
            {"up": "colwise", "down": "rowwise"},
            2,
            r"12 outputs \(from 4 inputs\).*'parts': 3",
        ),
        (
            Pair("to_qkv"),
            {"to_qkv": "colwise", "down": "rowwise"},
            2,
            "may hold several projections",
        ),
        (
            Pair(),
            {"up": {"style": "colwise", "parts": 3}},
            2,
            "8 outputs, which are not 3 equal parts",
        ),
        (
            Pair(),
            {"up": {"style": "colwise", "heads": 4, "parts": 1}},
            8,
            "4 attention heads .*tp=8 does not divide",
        ),
        (
            gpt(heads=6),
            None,
            4,
            "6 attention heads .*, which tp=4 does not divide; set tp to one of 1, 2, 3, 6",
        ),
        (gpt(), {"layers.0.attn.qkv": {"style": "colwise", "parts": 1}}, 2, "leave it out"),
        (
            MLP(6, (12,), 3),
            {"layers.1": "vocab"},
            4,
            "has 3 rows, and tp=4 leaves 1 of the workers .* set tp to 3",
        ),
        (
            gpt(),
            {"embed": "vocab", "head": "replicate"},
            2,
            r"'embed\.weight' and 'head\.weight' are one parameter",
        ),
        (Scaled(), {"up": "colwise", "down": "rowwise"}, 2, None),
        (
            nn.Sequential(Scaled()),
            {"0.up": "colwise", "0.down": "rowwise"},
            2,
            "'0' has a parameter 'scale' of its own beside",
        ),
        (
            nn.Sequential(Scaled()),
            {"0": "replicate", "0.up": "colwise", "0.down": "rowwise"},
            2,
            None,
        ),
        (
            nn.MultiheadAttention(8, 2),
            {"out_proj": "rowwise"},
            2,
            "belongs to a torch.nn.MultiheadAttention, .* leave it out",
        ),
        (
            nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)),
            {"0": "vocab"},
            2,
            r"\(Embedding\) has max_norm",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    model: nn.Module, plan: Any, tp: int, message: str | None
) -> None:
    if message is None:
        assert styles(model, plan, tp)
        return
    with pytest.raises(UserError, match=message):
        styles(model, plan, tp)


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="the plan makes no module 'sequence'"):
        styles(MLP(6, (12,), 10), sequence=True)
    with pytest.raises(UserError, match="loss_parallel=True, but the plan makes no Linear 'vocab'"):
        styles(MLP(6, (12,), 10), loss=True)
