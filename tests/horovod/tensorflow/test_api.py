"""The table of Horovod's calls is what the modules for TensorFlow and Keras are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from allhands.horovod.keras.callbacks import BestModelCheckpoint
from tests.horovod.api import checking
from tests.horovod.api.calls import MODULES
from tests.horovod.tensorflow.workers import Workers

OURS = [name for name in MODULES if not name.startswith("horovod.torch")]


@pytest.mark.parametrize("module", OURS)
def test_every_call_is_there_and_takes_horovods_arguments(module: str) -> None:
    assert checking.problems(module) == []


def test_what_is_refused_says_what_to_use() -> None:
    refused = {call.name for name in OURS for call in MODULES[name] if call.state == "refused"}
    assert refused == {"BestModelCheckpoint"}
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(path, save_best_only=True\)"):
        BestModelCheckpoint(monitor="loss")


def _outcomes(module: str, folder: str) -> dict[str, Any]:
    import allhands.horovod.tensorflow as hvd
    from tests.horovod.tensorflow import trials

    ours: Any = importlib.import_module(f"allhands.{module}")
    timeline = f"{folder}/{hvd.rank()}.json"
    if module.endswith("callbacks"):
        calls = trials.callbacks(ours)
    elif module.endswith("elastic"):
        calls = trials.elastic(ours, "keras" in module)
    elif module.endswith("keras"):
        calls = trials.keras(ours, timeline, folder)
    else:
        calls = trials.tensorflow(timeline)
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.serial
@pytest.mark.parametrize("module", OURS)
def test_every_call_runs_and_gives_all_ranks_the_same(
    workers: Workers, module: str, tmp_path: Path
) -> None:
    ranks = workers(_outcomes, module, str(tmp_path))
    # To leave ends what the other tests use.
    wanted = {call.name for call in MODULES[module] if call.state != "refused"} - {"shutdown"}
    assert set(ranks[0]) == wanted
    for name in wanted:
        values = [found[name] for found in ranks]
        assert not any(isinstance(value, str) and "Error: " in value for value in values), name
        if "reducescatter" not in name:  # each rank's own rows
            assert values[0] == values[1], name
