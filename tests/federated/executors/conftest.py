"""Each test is in a world of one process, which ends with it."""

from __future__ import annotations

import pytest

import allhands


@pytest.fixture(autouse=True)
def _world():
    yield allhands.init(device="cpu")
    allhands.finalize()
