"""Jobs of the launcher whose parameter servers notice in a moment that a worker is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.failing_workers import LEASE
from tests.launch.conftest import Job, mark  # noqa: F401


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_KVSTORE_LEASE", str(LEASE))


@pytest.fixture
def job(
    mark: str,  # noqa: F811
    short_lease: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Job:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return Job(mark, tmp_path)
