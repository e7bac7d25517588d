"""Which trainings cannot go on in their processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allhands.loop.elastic import Elastic


@pytest.mark.parametrize(
    ("backend", "said"), [("nccl", "with nccl no such training was seen"), ("gloo", "")]
)
def test_models_in_parts_are_refused_with_nccl(backend: str, said: str) -> None:
    elastic = Elastic.__new__(Elastic)
    elastic.world, elastic.began_with = SimpleNamespace(backend=backend), 4  # type: ignore[assignment]
    elastic.loop = SimpleNamespace(checkpoints=SimpleNamespace(keeps_parts=str))  # type: ignore[assignment]
    group: Any = SimpleNamespace(
        placement=SimpleNamespace(copy_size=2),
        settings=SimpleNamespace(step="auto", activation_checkpointing=False),
        strategy=SimpleNamespace(in_words=lambda: "mesh"),
    )
    refused = elastic._refused_in_parts(group) or ""
    assert said in refused
    assert bool(said) == bool(refused)
