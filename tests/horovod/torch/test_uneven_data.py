"""Ranks with different numbers of batches train as one process does, and join at the end."""

from __future__ import annotations

import pytest
import torch

import allhands.horovod.torch as hvd
from tests.horovod.torch.optimizer_training import by_hand, train
from tests.worlds import in_world

pytestmark = pytest.mark.serial
CASES = [("sgd", "Average"), ("adamw", "Average"), ("sgd", "Sum"), ("adamw", "ActiveAverage")]


def uneven() -> list[list[torch.Tensor]]:
    hvd.init()
    found = [train(kind, op) for kind, op in CASES]
    hvd.shutdown()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_data_with_join_trains_as_one_process_does(size: int) -> None:
    ranks = in_world(size, uneven)
    for number, (kind, op) in enumerate(CASES):
        wanted = by_hand(size, kind, op)
        for found in ranks:
            for own, other in zip(found[number], wanted, strict=True):
                torch.testing.assert_close(
                    own, other, atol=1e-6, rtol=0, msg=lambda text, op=op: f"{op}: {text}"
                )
