"""The folder that a training writes its numbers to."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from allhands.loop.loggers import prepare_logdir


def test_ranks_of_the_same_process_number_may_share_a_logdir(tmp_path: Path) -> None:
    """Those of two hosts or containers; here they are threads."""
    logdir = tmp_path / "shared"
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(prepare_logdir, [logdir] * 400)) == {logdir}
    finally:
        sys.setswitchinterval(interval)
    assert list(logdir.iterdir()) == []
