from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import SupervisedRunner, UserError
from allhands.models.transformer import NextToken
from allhands.step import LossRule


def test_cross_entropy_counts_the_targets_that_are_not_ignored() -> None:
    rule = LossRule(nn.CrossEntropyLoss(ignore_index=2))
    counted = rule.count_targets([torch.tensor([0, 2, 1]), torch.tensor([2, 2])])
    assert counted is not None
    assert counted.tolist() == [2.0, 0.0]
    assert float(rule.call(torch.randn(2, 3), torch.tensor([2, 2]))) == 0.0, "not 0 / 0"


def test_class_weights_are_what_counts() -> None:
    weights = torch.tensor([1.0, 2.0, 4.0])
    rule = LossRule(nn.CrossEntropyLoss(weight=weights))
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    counted = rule.count_targets([target])
    assert counted is not None
    assert counted.tolist() == [11.0]
    assert torch.allclose(
        rule.call(output, target) / counted[0],
        nn.CrossEntropyLoss(weight=weights)(output, target).double(),
    )


def test_class_probabilities_count_samples() -> None:
    rule = LossRule(nn.CrossEntropyLoss())
    target = torch.rand(4, 3).softmax(1)
    counted = rule.count_targets([target])
    assert counted is not None
    output = torch.randn(4, 3)
    assert torch.allclose(
        rule.call(output, target) / counted[0], nn.CrossEntropyLoss()(output, target).double()
    )


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy, NextToken()])
def test_whole_targets_without_ignored_ones_spare_the_count(
    criterion: object, shape: tuple[int, ...]
) -> None:
    """Each sample has as many targets as the others."""
    rule = LossRule(criterion)  # type: ignore[arg-type]
    targets = torch.zeros(shape, dtype=torch.int64)
    targets[-1] = -100
    rule.use_samples_if_equal(targets)
    assert rule.counts_targets
    rule.use_samples_if_equal(targets.clamp(min=1))
    assert not rule.counts_targets
    assert rule.call is criterion


class Shifted(nn.CrossEntropyLoss):
    """Leaves out the last target of each sample, and so is no mean over all of them."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.parametrize("known", [False, True])
def test_a_class_that_averages_over_something_else_is_refused(known: bool) -> None:
    """Also where the targets are known to be whole, so that they are not counted."""
    output, target = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    for criterion, refused in ((NextToken(), False), (Shifted(), True)):
        rule = LossRule(criterion)
        if known:
            rule.use_samples_if_equal(target)
        with (
            pytest.raises(UserError, match="Shifted derives from CrossEntropyLoss")
            if refused
            else contextlib.nullcontext()
        ):
            rule.check_counts(output, target, rule.call(output, target))


def test_a_summing_criterion_is_known() -> None:
    assert LossRule(nn.MSELoss(reduction="sum")).sums
    assert not LossRule(nn.MSELoss()).sums


def test_one_loss_an_element_is_refused() -> None:
    with pytest.raises(UserError, match="reduction='none'.*write reduction='mean'"):
        LossRule(nn.MSELoss(reduction="none"))


def test_a_vector_is_refused() -> None:
    rule = LossRule(lambda output, target: (output - target) ** 2)
    output = torch.rand(3)
    with pytest.raises(UserError, match=r"shape \[3\]"):
        rule.check_value(rule.call(output, output))


def test_a_criterion_that_gives_no_tensor_is_refused() -> None:
    rule = LossRule(lambda output, target: 0.5)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="a float"):
        rule.check_value(0.5)


def test_shapes_that_would_broadcast_are_refused() -> None:
    rule = LossRule(nn.MSELoss())
    with pytest.raises(UserError, match=r"\[32, 1\].*\[32\].*unsqueeze"):
        rule.check_shapes(torch.rand(32, 1), torch.rand(32))
    rule.check_shapes(torch.rand(32, 1), torch.rand(32, 1))


def test_a_mean_over_targets_of_uneven_samples_is_refused_where_a_batch_is_divided() -> None:
    rule = LossRule(nn.MSELoss())
    seven = torch.rand(7, 1)
    with pytest.raises(UserError, match="a mean over 7 targets of 3 samples.*PerTarget"):
        rule.check_shapes(seven, seven, 3)
    assert rule.check_shapes(seven, seven)  # as a whole
    assert not rule.check_shapes(seven, seven, 7)  # the next ones may be uneven
    rule.one_target_a_sample = True
    assert rule.check_shapes(seven, seven, 7)
    assert LossRule(nn.MSELoss(reduction="sum")).check_shapes(seven, seven, 3)


class Nodes(SupervisedRunner):
    """Each sample has so many nodes as its first member says."""

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        counts, values = batch
        nodes = values.repeat_interleave(counts.long(), dim=0)
        return model(nodes), nodes


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_it_is_refused_in_the_step_that_shows_it(first: float) -> None:
    counts = torch.tensor([first, first, 3.0, 2.0])
    data = TensorDataset(counts, torch.ones(4, 1))
    loader = DataLoader(data, batch_size=2)
    model = nn.Linear(1, 1)
    options: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loaders": {"train": loader},
        "num_epochs": 1,
    }
    Nodes(device="cpu").train(criterion=nn.MSELoss(), **options)
    with pytest.raises(UserError, match=r"targets of 2 samples.*allhands\.PerTarget"):
        Nodes(device="cpu").train(criterion=nn.MSELoss(), accumulate=2, **options)


class Focal(nn.CrossEntropyLoss):
    """Averages over all targets, whatever `reduction` says."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


class Watched(nn.CrossEntropyLoss):
    """Notes how many rows it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(output))
        return super().forward(output, target)


@pytest.mark.parametrize("ignored", [0, 3, 6])
def test_a_derived_criterion_that_does_not_sum_is_refused(ignored: int) -> None:
    output, target = torch.randn(9, 5), torch.arange(9) % 5
    target[:ignored] = -100
    rule = LossRule(Focal())
    with pytest.raises(UserError, match="the criterion Focal derives from CrossEntropyLoss"):
        rule.check_counts(output, target, rule.call(output, target))


@pytest.mark.parametrize(("ignored", "rows"), [(0, 4), (2, 4), (3, 100), (6, 100)])
def test_a_derived_criterion_is_compared_on_a_few_samples(ignored: int, rows: int) -> None:
    """On more only where too few of the first ones count."""
    criterion = Watched()
    rule = LossRule(criterion)
    output, target = torch.randn(100, 5), torch.arange(100) % 5
    target[:ignored] = -100
    loss = rule.call(output, target)
    criterion.rows.clear()
    rule.check_counts(output, target, loss)
    assert max(criterion.rows) == rows
