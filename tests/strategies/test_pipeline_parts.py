"""Models as chains of parts, and where they are cut."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from allhands import UserError
from allhands.models import GPT, ResNet18
from allhands.strategies.pipeline_costs import by_parameters
from allhands.strategies.pipeline_parts import (
    balanced,
    chain_of,
    cut,
    pruned,
)
from allhands.strategies.pipeline_stage import check_all_used, shared_parameters

WORDS = torch.arange(24).view(3, 8) % 11


class Residual(nn.Module):
    """A skip connection between children, functions between them, a parameter of its own, and a
    module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.norm, self.last = (
            nn.Linear(4, 6),
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 2),
        )
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = F.relu(self.first(x)) * self.scale
        x = x + self.inner(x)
        if mask is not None:
            x = x * mask
        x = self.inner(self.norm(x).tanh())
        return self.last(x.flatten(1))


CHAINS = {
    "sequential": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Dropout(0.5), nn.Linear(5, 2)
        ),
        torch.randn(3, 4),
        ["0.0", "0.1", "1", "2"],
    ),
    "residual": (Residual, torch.randn(3, 4), ["first", "inner", "norm", "inner:2", "last"]),
    "resnet": (
        lambda: ResNet18(width=4),
        torch.randn(2, 3, 16, 16),
        ["conv", "norm", *(f"blocks.{n}" for n in range(8)), "head"],
    ),
    "gpt": (
        lambda: GPT(11, 8, layers=2, heads=2, width=8),
        WORDS,
        ["begin", "layers.0", "layers.1", "norm", "head"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_parts_one_after_another_are_the_model(name: str) -> None:
    make, x, names = CHAINS[name]
    torch.manual_seed(0)
    model = make()
    parts = chain_of(model)
    assert [part.name for part in parts] == names
    check_all_used(model, parts)
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        expected = copy.deepcopy(model)(x)
        torch.manual_seed(1)
        value = x
        for part in parts:
            root = pruned(model, part.uses)
            assert {name: id(p) for name, p in root.named_parameters()}.items() <= {
                name: id(p) for name, p in model.named_parameters(remove_duplicate=False)
            }.items()
            value = part.run(root, value)
        assert torch.equal(value, expected)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


class TwoInputs(Branching):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x) + y


class Dropping(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


class Misnamed(Branching):
    def chain(self) -> list[str]:
        return ["layers"]


class Forgetful(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)

    def chain(self) -> list[str]:
        return ["layer"]


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Branching,
            r"chain of its children.*Branching.*torch\.fx says.*nn\.Sequential, or give Branching "
            r"a method chain\(\)",
        ),
        (TwoInputs, "it takes x, y, and a chain takes one input"),
        (Dropping, r"something else in training than in evaluation \(use nn\.Dropout"),
        (Misnamed, r"Misnamed\.chain\(\) names 'layers', which is no submodule"),
        (Forgetful, r"no part of the Forgetful's chain uses other\.weight, other\.bias"),
        (hooked, "'0' of the Sequential has hooks"),
    ],
)
def test_what_is_no_chain_is_refused(make: type[nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(UserError, match=message):
        check_all_used(model, chain_of(model))


def test_the_most_expensive_stage_is_as_cheap_as_it_can_be() -> None:
    draws = random.Random(0)
    for _ in range(60):
        count = draws.randint(1, 9)
        costs = [draws.choice([0.0, draws.random(), 3 * draws.random()]) for _ in range(count)]
        stages = draws.randint(1, count)
        sizes = balanced(costs, stages)
        assert len(sizes) == stages
        assert sum(sizes) == count
        assert min(sizes) >= 1

        def worst(bounds: tuple[int, ...], costs: list[float] = costs) -> float:
            return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds))

        best = min(
            worst((0, *inner, count))
            for inner in itertools.combinations(range(1, count), stages - 1)
        )
        assert worst((0, *itertools.accumulate(sizes))) == pytest.approx(best, abs=1e-9)


def sequential(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def test_by_parameters_and_by_name_and_by_function() -> None:
    model = sequential([2, 2, 2, 40, 40])
    parts = chain_of(model)
    assert by_parameters(model, parts) == [6, 6, 120, 1640]

    def names(stages: object, count: int = 2) -> list[list[str]]:
        found = cut(parts, count, stages, lambda: by_parameters(model, parts), model)
        return [[part.name for part in stage] for stage in found]

    assert names("auto") == [["0", "1", "2"], ["3"]]
    assert names(["1"]) == [["0"], ["1", "2", "3"]]
    assert names(lambda model, count: [str(len(model) - count)], 2) == [["0", "1"], ["2", "3"]]
    for stages, count, message in (
        (
            ["1"],
            3,
            r"stages=\['1'\] names the beginning of 1 stages after the first, and there are 3 "
            r"stages: name 2",
        ),
        (
            ["1", "layer.2"],
            3,
            "no part of the Sequential is named 'layer.2'.*Its parts are 0, 1, 2, 3",
        ),
        (["2", "1"], 3, "must name parts in their order"),
        (["0"], 2, "must name parts in their order, none twice and not the first"),
        (
            "auto",
            5,
            "pipeline of 5 stages needs at least as many parts, and the Sequential is a chain of "
            "4: 0, 1, 2, 3",
        ),
    ):
        with pytest.raises(UserError, match=message):
            names(stages, count)


def test_shared_parameters_are_found_under_the_name_that_each_stage_has() -> None:
    model = GPT(11, 8, layers=2, heads=2, width=8)
    parts = chain_of(model)
    assert shared_parameters(model, [parts[:2], parts[2:3], parts[3:]]) == {
        "embed.weight": {0: "embed.weight", 2: "head.weight"}
    }
    assert shared_parameters(model, [parts]) == {}
    untied = GPT(11, 8, layers=2, heads=2, width=8, tied=False)
    parts = chain_of(untied)
    assert shared_parameters(untied, [parts[:2], parts[2:]]) == {}
