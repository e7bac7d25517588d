"""What ranks exchange: uneven and empty shares, counted targets, buffers, faults. Two and three
gloo workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import DDP, AllhandsError, Callback, SupervisedRunner, UserError
from tests.reference import Slope, global_batches, mean_output, relative_difference, train_by_hand
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


class SumOutput(nn.Module):
    reduction = "sum"

    def forward(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        return output.sum()


def train(
    model: nn.Module,
    tensors: Any,
    batch: int,
    criterion: Any,
    lr: float = 1.0,
    epochs: int = 1,
    **options: Any,
) -> Any:
    strategy = options.pop("strategy", None) or DDP()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    return SupervisedRunner(device="cpu").train(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(TensorDataset(*tensors), batch)},
        **options,
    )


def slopes() -> list[float]:
    found = []
    for samples, batch, accumulate, criterion in (
        (5, 3, 1, mean_output),
        (10, 1, 5, mean_output),
        (1, 4, 1, mean_output),
        (4, 2, 1, SumOutput()),
    ):
        model, x = Slope(), torch.arange(1.0, samples + 1)
        train(model, (x, x), batch, criterion, accumulate=accumulate)
        found.append(-float(model.w.detach()))
    return found


# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.rare), 3])
def test_gradients_are_means_over_samples(workers: int) -> None:
    """Each case is one global batch on two and more workers but not on one, where it takes several
    steps of lr 1."""
    expected = {
        1: [2 + 4.5, 3 + 8, 1.0, 3 + 7],
        2: [3.0, 5.5, 1.0, 10.0],
        3: [3.0, 5.5, 1.0, 10.0],
    }[workers]
    for rank, found in enumerate(in_world(workers, slopes)):
        assert found == pytest.approx(expected), rank


def make_classifier() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 4)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(23, 3, generator=generator), torch.randint(0, 4, (23,), generator=generator)
    y[torch.randperm(23, generator=generator)[:9]] = -100
    y[:6] = -100  # one rank's whole share
    return x, y


CRITERIA = {
    "ignore_index": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0])),
    "label smoothing": nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 5.0, 0.5, 2.0]), label_smoothing=0.1
    ),
    "functional": nn.functional.cross_entropy,
}


def counted_trainings() -> list[dict[str, torch.Tensor]]:
    weights = []
    for criterion in CRITERIA.values():
        for accumulate in (1, 2):
            model = make_classifier()
            train(model, labelled(), 3, criterion, lr=0.3, epochs=4, accumulate=accumulate)
            weights.append(model.state_dict())
    return weights


def check_counted_trainings(by_rank: list[list[dict[str, torch.Tensor]]]) -> None:
    """What `counted_trainings` gave on each rank is what a loop by hand gives."""
    workers = len(by_rank)
    cases = [
        (name, criterion, accumulate)
        for name, criterion in CRITERIA.items()
        for accumulate in (1, 2)
    ]
    for weights in by_rank:
        for (name, criterion, accumulate), found in zip(cases, weights, strict=True):
            model = make_classifier()
            size = 3 * workers * accumulate
            batches = global_batches(23, size, seed=0, shuffle=False)
            steps = 4 * -(-23 // size)
            train_by_hand(
                model,
                criterion,
                torch.optim.SGD(model.parameters(), lr=0.3),
                labelled(),
                batches,
                steps,
            )
            assert relative_difference(found, model.state_dict()) < 1e-6, (name, accumulate)


# rare on 2: 3 have what 2 have.
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.rare), 3])
def test_what_the_criterion_counts_is_what_is_averaged(workers: int) -> None:
    check_counted_trainings(in_world(workers, counted_trainings))


def batch_norm_statistics() -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model.register_buffer("constant", torch.tensor([0.1, 0.7]))
    x = (
        torch.cat([torch.zeros(8, 2), torch.ones(8, 2) * 4])
        .reshape(2, 8, 2)
        .transpose(0, 1)
        .reshape(16, 2)
    )
    train(model, (x, torch.rand(16, 1)), 4, nn.MSELoss(), lr=0.01)
    return dict(model.named_buffers())


def test_batch_norm_statistics_are_equal_on_all_ranks() -> None:
    first, second = in_world(2, batch_norm_statistics)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["constant"].tolist() == pytest.approx([0.1, 0.7])
    assert int(first["0.num_batches_tracked"]) == 2


class Forgetful(nn.Module):
    """Declares a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.never_used = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def forgetful() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Forgetful(), torch.rand(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    train(model, (x, x[:, :1]), 2, nn.MSELoss(), optimizer=optimizer, epochs=2)
    return model.state_dict()


def test_a_layer_that_is_never_used_is_left_alone_as_in_one_process() -> None:
    torch.manual_seed(0)
    model, x = Forgetful(), torch.rand(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    train_by_hand(
        model, nn.MSELoss(), optimizer, (x, x[:, :1]), global_batches(10, 4, 0, shuffle=False), 6
    )
    for found in in_world(2, forgetful):
        assert relative_difference(found, model.state_dict()) < 1e-6
        assert torch.equal(found["never_used.weight"], model.never_used.weight)


class Parts(SupervisedRunner):
    """Calls a part of the model, and not the model."""

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model.used(batch[0]), batch[1]


def in_parts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Forgetful(), torch.rand(10, 2)
    Parts(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        distributed="ddp",
        loaders={"train": DataLoader(TensorDataset(x, x[:, :1]), 2)},
    )
    return model.state_dict()


def test_parts_of_the_model_may_be_called() -> None:
    torch.manual_seed(0)
    model, x = Forgetful(), torch.rand(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_by_hand(
        model, nn.MSELoss(), optimizer, (x, x[:, :1]), global_batches(10, 4, 0, shuffle=False), 3
    )
    for found in in_world(2, in_parts):
        assert relative_difference(found, model.state_dict()) < 1e-6


def test_a_setting_without_effect_is_said() -> None:
    with pytest.warns(DeprecationWarning, match="static_graph=True\\) has no effect"):
        DDP(static_graph=True)


class Drift(Callback):
    def on_step_end(self, training: Any) -> None:
        if training.step == 3 and training.world.rank == 1:
            with torch.no_grad():
                training.model.weight.add_(1e-6)


def drifting() -> None:
    x = torch.rand(40, 2)
    train(
        nn.Linear(2, 1),
        (x, x[:, :1]),
        2,
        nn.MSELoss(),
        strategy=DDP(check_weights_every=2),
        callbacks=[Drift()],
    )


def test_weights_are_compared_every_few_steps() -> None:
    with pytest.raises(
        AllhandsError, match="at step 4: the ranks' weights differ in 1 parameter.*first 'weight'"
    ):
        in_world(2, drifting)


def test_sync_batchnorm_needs_gpus() -> None:
    with pytest.raises(UserError, match="sync_batchnorm=True\\) needs GPUs"):
        x = torch.rand(4, 2)
        train(
            nn.Linear(2, 1),
            (x, x[:, :1]),
            2,
            nn.MSELoss(),
            strategy=DDP(sync_batchnorm=True),
            workers=2,
        )
