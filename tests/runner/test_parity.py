"""N workers against a hand-written single-process loop over the same global batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from allhands import DDP, Callback, SupervisedRunner
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.worlds import in_world

SAMPLES, STEPS, SEED = 101, 20, 7  # 101 is prime: no batch size and no number of workers divides it
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
CASES = list(itertools.product(OPTIMIZERS, (1, 3), (None, 0.1), ("memory", "loader")))


class StopAt(Callback):
    """Remembers the weights after `steps` optimizer steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_end(self, training: Any) -> None:
        if training.step == self.steps:
            self.weights = {k: v.clone() for k, v in training.model.state_dict().items()}
            training.stop("enough")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, torch.randint(0, 4, (SAMPLES,), generator=generator)


def own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def train_all_cases(strategy: Any) -> list[dict[str, torch.Tensor]]:
    """The weights after 20 steps of every case, in the world that this process is in."""
    results = []
    for optimizer_name, accumulate, clip_norm, kind in CASES:
        model, data = make_model(), TensorDataset(*make_data())
        keep = StopAt(STEPS)
        options = {"collate_fn": own_collate} if kind == "loader" else {}
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=OPTIMIZERS[optimizer_name](model.parameters()),
            loaders={"train": DataLoader(data, batch_size=4, shuffle=True, **options)},
            callbacks=[keep],
            num_epochs=50,
            accumulate=accumulate,
            clip_norm=clip_norm,
            seed=SEED,
            distributed=strategy,
        )
        results.append(keep.weights)
    return results


@pytest.mark.serial
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.rare
def test_workers_equal_the_hand_written_loop(workers: int) -> None:
    by_rank = in_world(workers, train_all_cases, DDP())
    for rank, results in enumerate(by_rank):
        for case, weights in zip(CASES, results, strict=True):
            optimizer_name, accumulate, clip_norm, _ = case
            model = make_model()
            optimizer = OPTIMIZERS[optimizer_name](model.parameters())
            batches = global_batches(SAMPLES, 4 * workers * accumulate, SEED)
            train_by_hand(
                model, nn.CrossEntropyLoss(), optimizer, make_data(), batches, STEPS, clip_norm
            )
            assert relative_difference(weights, model.state_dict()) < 1e-6, (rank, case)


def test_single_equals_the_hand_written_loop_bit_for_bit() -> None:
    for case, weights in zip(CASES, train_all_cases(False), strict=True):
        optimizer_name, accumulate, clip_norm, _ = case
        if accumulate > 1:
            continue
        model = make_model()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        train_by_hand(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            make_data(),
            global_batches(SAMPLES, 4, SEED),
            STEPS,
            clip_norm,
        )
        assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items()), case
