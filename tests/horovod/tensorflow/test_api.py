"""The table of Horovod's calls is what the modules for TensorFlow and Keras are."""

from __future__ import annotations

import pytest

from allhands.horovod.keras.callbacks import BestModelCheckpoint
from tests.horovod.api import checking
from tests.horovod.api.calls import MODULES

OURS = [name for name in MODULES if not name.startswith("horovod.torch")]


@pytest.mark.parametrize("module", OURS)
def test_every_call_is_there_and_takes_horovods_arguments(module: str) -> None:
    assert checking.problems(module) == []


def test_what_is_refused_says_what_to_use() -> None:
    refused = {call.name for name in OURS for call in MODULES[name] if call.state == "refused"}
    assert refused == {"BestModelCheckpoint"}
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(path, save_best_only=True\)"):
        BestModelCheckpoint(monitor="loss")
