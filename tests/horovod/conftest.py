"""A matcher of three ranks, and its clock."""

from __future__ import annotations

import pytest

from allhands.horovod.matcher import Matcher


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def matcher(clock: Clock) -> Matcher:
    return Matcher(3, 1000, 60.0, 600.0, clock)
