"""The world of tests that train in this process alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import allhands


@pytest.fixture
def world() -> Iterator[allhands.World]:
    """Of one process; it ends with the test."""
    yield allhands.init(device="cpu")
    allhands.finalize()
