"""Trainings of sliced layers on four workers against the plain model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.reference import global_batches, relative_difference, train_by_hand
from tests.strategies.sliced_models import BATCH, SAMPLES, STEPS, TRAININGS, mlp, train
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]


def by_hand(name: str) -> tuple[dict[str, torch.Tensor], Any]:
    _, shares, make, data, criterion, optimizer = TRAININGS[name]
    model, size = make(), BATCH * shares * 2
    train_by_hand(
        model,
        criterion,
        optimizer(model),
        data(),
        global_batches(SAMPLES, size, 42),
        STEPS,
        clip_norm=0.5,
    )
    with torch.no_grad():
        output, target = model.eval()(data()[0]), data()[1]
        values = {"loss": float(criterion(output, target))}
        if make is mlp:
            values["accuracy"] = float((output.argmax(1) == target).float().mean())
    return model.state_dict(), values


def trainings() -> dict[str, Any]:
    return {name: train(name) for name in TRAININGS}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """What each rank has trained."""
    return in_world(4, trainings)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.rare
def test_a_training_equals_the_hand_written_loop(trained: list[dict[str, Any]], name: str) -> None:
    expected, expected_values = by_hand(name)
    for found in trained:
        weights, values = found[name]
        assert relative_difference(weights, expected) < 1e-6
        assert values == pytest.approx(expected_values, rel=1e-5)
