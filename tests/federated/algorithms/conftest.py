from __future__ import annotations

from collections.abc import Iterator

import pytest

import allhands


@pytest.fixture(autouse=True)
def _world() -> Iterator[object]:
    yield allhands.init(device="cpu")
    allhands.finalize()
