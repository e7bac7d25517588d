from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire.attacks import attacked

pytestmark = [pytest.mark.serial, pytest.mark.timeout(500)]


@pytest.mark.parametrize("kind", ["srun", "launch"])
def test_strangers_on_every_port_of_a_job_change_nothing(kind: str, tmp_path: Path) -> None:
    assert attacked(tmp_path, kind, 1.0, 7) == []
