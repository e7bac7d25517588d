"""Which ways of a training a plan looks at."""

from __future__ import annotations

import pytest

from allhands.planning.candidates import candidates

ALONE = ["ddp", "ddp sharded", "fsdp", "kvstore", "local_sgd every 32"]


@pytest.mark.parametrize(
    ("gpus", "per_host", "more"),
    [
        (4, 8, ["tensor", "pipeline"]),
        (
            16,
            4,
            [
                "mesh replicate 4 shard 4",
                "mesh dp 4 tp 4",
                "mesh shard 4 tp 4",
                "mesh pp 8 dp 2",
            ],
        ),
        # A product of one factor is that strategy alone.
        (2, 1, ["pipeline"]),
        (8, 4, ["mesh replicate 2 shard 4", "mesh dp 2 tp 4", "mesh shard 2 tp 4", "pipeline"]),
        (6, 4, []),
    ],
)
def test_products_are_of_several_strategies(gpus: int, per_host: int, more: list[str]) -> None:
    assert [one.name for one in candidates(gpus, per_host)] == ALONE + more


def test_one_gpu_trains_alone() -> None:
    assert [one.name for one in candidates(1, 8)] == ["single"]
