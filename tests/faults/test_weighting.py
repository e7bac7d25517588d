"""Averages of averages: shares and micro-batches of unequal size, ignored targets, class weights,
sums.

Kinds of fault: huggingface/transformers#34191, pytorch/torchtitan#2206 (accumulated tokens),
pytorch/pytorch#37359 and #67253
(unequal shares), pytorch/pytorch#36516 and ultralytics/ultralytics#18616 (the world size once too
often).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, SupervisedRunner
from tests.faults.probes import Found, a_share, probe, size, train
from tests.reference import Slope, global_batches, mean_output, relative_difference, train_by_hand
from tests.refusals import refused

pytestmark = pytest.mark.serial

CLASSES = 4
WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0])


class Flattened(nn.CrossEntropyLoss):
    """Takes ``[batch, length, classes]``, as language models give it."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.transpose(1, 2).flatten(2), target)


class Focal(nn.CrossEntropyLoss):
    """A mean over the samples whatever `reduction` says, as is often written."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return (each * (1 - torch.exp(-each))).mean()


class Transposed(nn.Module):
    """Gives ``[batch, length, classes]``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).transpose(1, 2)


def targets() -> dict[str, torch.Tensor]:
    """Of 7 samples, the first 3 of which have no counted target."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, CLASSES, (7,), generator=generator)
    positions = torch.randint(0, CLASSES, (7, 5), generator=generator)
    some, zero = classes.clone(), classes.clone()
    some[:3], zero[:3] = -100, 0
    holes = positions.clone()
    holes[:3], holes[4, 1:] = -100, -100
    return {
        "classes": classes,
        "some ignored": some,
        "zeros": zero,
        "positions": positions,
        "holes": holes,
        "soft": torch.randn(7, CLASSES, generator=generator).softmax(1),
        "soft positions": torch.randn(7, CLASSES, 5, generator=generator).softmax(1),
        "values": torch.randn(7, CLASSES, generator=generator),
        "shares": torch.rand(7, CLASSES, generator=generator),
    }


# name -> (criterion, target)
CASES: dict[str, tuple[Any, str]] = {
    "ignored": (nn.CrossEntropyLoss(), "some ignored"),
    "ignored positions": (nn.CrossEntropyLoss(), "holes"),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), "some ignored"),
    "class weights, positions": (nn.CrossEntropyLoss(weight=WEIGHTS), "holes"),
    "label smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "holes"),
    "another index": (nn.CrossEntropyLoss(ignore_index=0), "zeros"),
    "negative log likelihood": (nn.NLLLoss(ignore_index=0), "zeros"),
    "partial, another index": (functools.partial(F.cross_entropy, ignore_index=0), "zeros"),
    "partial, class weights": (functools.partial(F.cross_entropy, weight=WEIGHTS), "classes"),
    "partial, sum": (functools.partial(F.cross_entropy, reduction="sum"), "some ignored"),
    "soft": (nn.CrossEntropyLoss(), "soft"),
    "soft, class weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), "soft"),
    "soft positions": (nn.CrossEntropyLoss(), "soft positions"),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), "classes"),
    "squares": (nn.MSELoss(), "values"),
    "sum of squares": (nn.MSELoss(reduction="sum"), "values"),
    "partial, sum of squares": (functools.partial(F.mse_loss, reduction="sum"), "values"),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), "soft"),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), "shares"),
    "derived": (Flattened(), "holes"),
}


def model_for(case: str) -> nn.Module:
    torch.default_generator.manual_seed(2)
    if "positions" in CASES[case][1] or CASES[case][1] == "holes":
        model: nn.Module = nn.Conv1d(3, CLASSES, 1)
        return Transposed(model) if case == "derived" else model
    return nn.Linear(3, CLASSES)


def input_for(case: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(7, 3, 5, generator=generator)
        if not isinstance(model_for(case), nn.Linear)
        else torch.randn(7, 3, generator=generator)
    )


def by_hand(case: str) -> tuple[nn.Module, float]:
    """Two steps of the whole data set in plain PyTorch, and the first step's loss."""
    criterion, target = CASES[case]
    model = model_for(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = global_batches(7, 7, seed=0, shuffle=False)
    return model, train_by_hand(
        model, criterion, optimizer, (input_for(case), targets()[target]), batches, 2
    )[0]


@probe
def criteria() -> dict[str, Any]:
    """Each case with all samples in one step: as one micro-batch a rank, and sample by sample."""
    results = {}
    for case, (criterion, target) in CASES.items():
        for batch, accumulate in ((a_share(7), 1), (1, a_share(7))):
            model, own = model_for(case), copy.deepcopy(criterion)
            tensors = (input_for(case), targets()[target])
            history = train(model, tensors, batch, own, lr=0.1, epochs=2, accumulate=accumulate)
            results[f"{case}/{accumulate > 1}"] = {
                "weights": model.state_dict(),
                "loss": history["train"]["loss"][0],
            }
    return results


@pytest.mark.parametrize("case", CASES)
def test_shares_and_micro_batches_of_any_size_give_the_gradient_of_the_whole(
    found: Found, case: str
) -> None:
    model, loss = by_hand(case)
    if "sum" in case:
        loss /= 7  # reported for a sample
    for ours in found(criteria):
        for accumulated in (False, True):
            result = ours[f"{case}/{accumulated}"]
            assert relative_difference(result["weights"], model.state_dict()) < 1e-6, accumulated
            assert result["loss"] == pytest.approx(loss, rel=1e-6), accumulated


@probe
def one_and_nine_labels() -> dict[str, torch.Tensor]:
    """Two micro-batches of 10 rows, with 1 and with 9 labels."""
    x, y = labelled_rows()
    model = nn.Linear(3, CLASSES)
    nn.init.constant_(model.weight, 0.1), nn.init.zeros_(model.bias)
    train(model, (x, y), 10, nn.CrossEntropyLoss(), lr=0.5, accumulate=2 if size() == 1 else 1)
    return model.state_dict()


def labelled_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(20, 3, generator=generator),
        torch.randint(0, CLASSES, (20,), generator=generator),
    )
    y[1:10], y[19] = -100, -100
    return x, y


def test_a_micro_batch_with_one_label_weighs_a_ninth_of_one_with_nine(found: Found) -> None:
    x, y = labelled_rows()
    model = nn.Linear(3, CLASSES)
    nn.init.constant_(model.weight, 0.1), nn.init.zeros_(model.bias)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        expected = {name: p - 0.5 * p.grad for name, p in model.named_parameters()}
    for weights in found(one_and_nine_labels):
        assert relative_difference(weights, expected) < 1e-6


@probe
def three_and_one() -> float:
    """The user's batch sampler gives 1, 2, 3 to one rank and 8 to the next, as one step."""
    model, x = Slope(), torch.tensor([1.0, 2.0, 3.0, 8.0])
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=mean_output,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        distributed=DDP(),
        loaders={"train": DataLoader(TensorDataset(x, x), batch_sampler=[[0, 1, 2], [3]])},
        accumulate=2 if size() == 1 else 1,
    )
    return -float(model.w.detach())


def test_three_samples_on_one_rank_and_one_on_another(found: Found) -> None:
    # The mean of the ranks' means would be 5.
    assert found(three_and_one) == pytest.approx([3.5] * found.workers)


@probe
def double() -> float:
    model, x = Slope().double(), torch.arange(1.0, 6, dtype=torch.float64)
    train(model, (x, x), a_share(5))
    return -float(model.w.detach())


def test_float64_models_keep_their_precision(found: Found) -> None:
    assert found(double) == pytest.approx([3.0] * found.workers, rel=1e-15)


@probe
def nothing_counts() -> dict[str, Any]:
    torch.default_generator.manual_seed(2)
    model = nn.Linear(3, CLASSES)
    before = model.weight.detach().clone()
    history = train(model, (torch.ones(7, 3), torch.full((7,), -100)), 2, nn.CrossEntropyLoss())
    return {"same": torch.equal(before, model.weight), "steps": history["step"]}


def test_a_step_in_which_no_target_counts_changes_nothing(found: Found) -> None:
    steps = -(-7 // (2 * found.workers))
    # Plain PyTorch: 0/0.
    assert found(nothing_counts) == [{"same": True, "steps": [steps]}] * found.workers


def image_model() -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    return model.to(memory_format=torch.channels_last)


def images(workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two steps in batches of 2 a worker, the second of one sample."""
    n = 2 * workers + 1
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 2


@probe
def channels_last() -> dict[str, torch.Tensor]:
    model = image_model()
    train(model, images(size()), 2, nn.CrossEntropyLoss(), lr=0.1)
    return model.state_dict()


def test_another_memory_format_changes_nothing(found: Found) -> None:
    model = image_model()
    batches = global_batches(2 * found.workers + 1, 2 * found.workers, seed=0, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_by_hand(model, nn.CrossEntropyLoss(), optimizer, images(found.workers), batches, 2)
    for weights in found(channels_last):
        assert relative_difference(weights, model.state_dict()) < 1e-5


@probe
def focal() -> str:
    return refused(
        lambda: train(
            nn.Linear(3, CLASSES), (torch.ones(6, 3), torch.zeros(6, dtype=torch.long)), 2, Focal()
        )
    )


def test_a_derived_criterion_that_averages_over_something_else_is_refused(found: Found) -> None:
    for message in found(focal):
        assert "Focal derives from CrossEntropyLoss" in message
        assert "derive it from nn.Module" in message


@probe
def summed_trajectory() -> list[dict[str, torch.Tensor]]:
    """Global batches of 6, however they are made up, on 16 samples: the last step is short."""
    found = []
    x, y = regression()
    for batch, accumulate in (
        (6 // size(), 1),
        *(((3, 2),) if size() == 1 else ((1, 6 // size()),)),
    ):
        model = line()
        train(
            model,
            (x, y),
            batch,
            nn.MSELoss(reduction="sum"),
            lr=0.01,
            epochs=3,
            accumulate=accumulate,
        )
        found.append(model.state_dict())
    return found


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(6))
    return x, x.sum(1, keepdim=True)


def line() -> nn.Module:
    torch.default_generator.manual_seed(4)
    return nn.Linear(2, 1)


def test_a_summed_loss_follows_the_same_path_on_any_world(found: Found) -> None:
    model = line()
    batches = global_batches(16, 6, seed=0, shuffle=False)
    train_by_hand(
        model,
        nn.MSELoss(reduction="sum"),
        torch.optim.SGD(model.parameters(), lr=0.01),
        regression(),
        batches,
        9,
    )
    for results in found(summed_trajectory):
        for weights in results:
            assert relative_difference(weights, model.state_dict()) < 1e-5
