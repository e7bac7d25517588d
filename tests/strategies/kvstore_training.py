"""A small training through a key-value store, and the same by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from allhands import SupervisedRunner
from tests.reference import global_batches, train_by_hand
from tests.runner.problems import classification, classifier

SAMPLES, BATCH, EPOCHS = (
    49,
    4,
    2,
)  # with 2 and 3 workers, the last step of an epoch has one sample, so that a rank is idle


def make_optimizer(name: str, model: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.02)
    first, last = model[0].parameters(), model[3].parameters()
    return torch.optim.AdamW(
        [{"params": last, "lr": 0.03}, {"params": first, "weight_decay": 0.1}], lr=0.01
    )


def make_scheduler(name: str, optimizer: Any) -> Any:
    # It changes the learning rate and momentum in every step.
    return (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=200)
        if name == "sgd"
        else None
    )


def train(
    strategy: Any, name: str = "adam", batch: int = BATCH, epochs: int = EPOCHS, **options: Any
) -> Any:
    model = classifier()
    optimizer = make_optimizer(name, model)
    data = classification(SAMPLES)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        num_epochs=epochs,
        distributed=strategy,
        loaders={"train": DataLoader(data, batch, shuffle=True)},
        scheduler=make_scheduler(name, optimizer),
        **options,
    )
    return model, optimizer, history


def by_hand(size: int, name: str, clip_norm: float | None) -> dict[str, torch.Tensor]:
    model = classifier()
    optimizer = make_optimizer(name, model)
    scheduler = make_scheduler(name, optimizer)
    steps = EPOCHS * -(-SAMPLES // size)
    train_by_hand(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        classification(SAMPLES).tensors,
        global_batches(SAMPLES, size, 42),
        steps,
        clip_norm,
        scheduler.step if scheduler else lambda: None,
    )
    return model.state_dict()
