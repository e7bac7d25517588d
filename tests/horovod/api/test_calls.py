"""The page of Horovod's calls is what its table says, and the table what the modules are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.horovod.api import checking
from tests.horovod.api.calls import MODULES
from tests.horovod.api.page import PAGE, write
from tests.worlds import in_world

SIZE = 2
TORCH = ["horovod.torch", "horovod.torch.elastic"]


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == write(), "renew it with `make horovod`"


def test_a_note_is_there_where_something_is_not_as_in_horovod() -> None:
    for calls in MODULES.values():
        names = [call.name for call in calls]
        assert len(names) == len(set(names))
        for call in calls:
            assert call.state in ("works", "differs", "refused"), call
            assert bool(call.note) == (call.state != "works"), call


@pytest.mark.parametrize("module", TORCH)
def test_every_call_is_there_and_takes_horovods_arguments(module: str) -> None:
    assert checking.problems(module) == []


def outcomes(folder: Path) -> dict[str, Any]:
    import allhands.horovod.torch as hvd
    from tests.horovod.api.trials import calls

    hvd.init()
    found = {}
    for name, call in calls(folder).items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two ranks got equal values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.serial
def test_every_call_for_torch_runs_and_gives_all_ranks_the_same(tmp_path: Path) -> None:
    ranks = in_world(SIZE, outcomes, tmp_path)
    wanted = {call.name for module in TORCH for call in MODULES[module] if call.state != "refused"}
    assert set(ranks[0]) == wanted
    for name in wanted:
        values = [found[name] for found in ranks]
        assert not any(isinstance(value, str) and "Error: " in value for value in values), values
        rows = name.startswith("reducescatter") or name.startswith("grouped_reducescatter")
        if not rows:  # each rank's own
            assert same(*values), f"{name}: {values}"
