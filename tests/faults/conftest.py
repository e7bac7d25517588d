"""The worlds of 1, 2 and 3 workers in which all probes run."""

from __future__ import annotations

import pytest

from tests.faults.probes import Found, run_in_world

_KEPT: dict[int, Found] = {}


@pytest.fixture(
    scope="session",
    # rare: 1, which conformance has too, and 2, of which 3 have all.
    params=[pytest.param(1, marks=pytest.mark.rare), pytest.param(2, marks=pytest.mark.rare), 3],
    ids=lambda workers: f"{workers} worker{'s' if workers > 1 else ''}",
)
def found(request: pytest.FixtureRequest) -> Found:
    """What every probe gave, by rank. One start a size, whatever the order of the tests."""
    workers = request.param
    if workers not in _KEPT:
        rare = any(item.get_closest_marker("rare") for item in request.session.items)
        _KEPT[workers] = run_in_world(workers, rare)
    return _KEPT[workers]
