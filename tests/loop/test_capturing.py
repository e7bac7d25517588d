"""Which trainings' steps are captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allhands import DDP, LocalSGD, UserError
from allhands.loop import capturing


@pytest.mark.parametrize("elastic", [False, True])
def test_workers_of_local_sgd_are_not_captured_where_others_may_take_their_steps(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "in_elastic_job", lambda: elastic)
    world: Any = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    task: Any = SimpleNamespace(own_calls="")

    def captured(strategy: Any, step: str) -> bool:
        settings: Any = SimpleNamespace(step=step, strategy=strategy, model=torch.nn.Linear(1, 1))
        return capturing.captures_steps(settings, world, task, False, said.append)

    said: list[str] = []
    assert captured(DDP(), "auto")
    assert captured(LocalSGD(every=4), "auto") is not elastic
    if elastic:
        why = "with --elastic one process may take the steps of several workers of 'local_sgd'"
        assert why in said[0]
        with pytest.raises(UserError, match="step='graph'.*several workers of 'local_sgd'"):
            captured(LocalSGD(every=4), "graph")
