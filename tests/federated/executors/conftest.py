"""Each test is in a world of one process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _world(world):
    return world
