"""What every test shares: where real data lies, and a check that no test leaves a process behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Seconds for which the process that imports torch for workers waits for the next test that starts some. Tests about the start and
# end of processes unset it (tests/launch).
os.environ.setdefault("ALLHANDS_KEEPER_IDLE", "120")


def pytest_configure() -> None:
    """Give the tests the signals of a terminal: under nohup, or in the background of a script, some are ignored, and every
    process that a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, with a reason, where no GPU can be used."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    count = torch.cuda.device_count()
    for item in gpu_items:
        marker = item.get_closest_marker("gpu")
        assert marker is not None
        needed = marker.args[0] if marker.args else 1
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {count}"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets (see DATASETS.md there); skips where it is absent."""
    candidates = [os.environ.get("ALLHANDS_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and (Path(candidate) / "write_official.py").is_file():
            return Path(candidate)
    pytest.skip("no data folder with write_official.py: set ALLHANDS_DATA to one (looked at $ALLHANDS_DATA and ../shared/data)")


@pytest.fixture(autouse=True)
def _no_world_left() -> Iterator[None]:
    """Fail the test that leaves its process in a world, rather than whichever test comes next in that process."""
    yield
    group = sys.modules.get("allhands.world.group")
    world = group.current_world() if group is not None else None
    if group is not None and world is not None:
        group.finalize()
        pytest.fail(f"this test left its process in a world: {world}")
