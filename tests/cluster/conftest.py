"""The fixtures of the tests that need hosts, Slurm or MPI. All tests here carry the marker
`cluster`.

They skip, and say why, where a part is missing. After each test that used hosts, none of its
processes may be left on them, and all harm is undone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import hosts as from_namespaces
from tests.cluster import slurm as real_slurm
from tests.cluster.hosts import Hosts
from tests.cluster.mpi import NAMES, Mpi, launcher, launchers
from tests.cluster.slurm import Slurm

# seconds in which the processes of a test have to be gone; a cut connection is noticed after some
GRACE = 10.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all tests of this folder."""
    item.add_marker("cluster")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts, d1 and d2."""
    if reason := from_namespaces.why_not():
        pytest.skip(reason)
    with Hosts(("d1", "d2"), label=f"hosts-{os.getpid()}") as hosts:
        yield hosts


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes, d1 and d2, with 4 CPUs and 2 GPUs each that exist on paper."""
    if reason := real_slurm.why_not():
        pytest.skip(reason)
    with Slurm(("d1", "d2"), label=f"slurm-{os.getpid()}") as slurm:
        yield slurm


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """One MPI launcher after the other; each that is missing is a test that is skipped."""
    found = launcher(request.param)
    if not isinstance(found, Mpi):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def mpi_launchers() -> list[Mpi]:
    """All MPI launchers that are here; skips when there is none."""
    found = launchers()
    if not found:
        pytest.skip("; ".join(str(launcher(name)) for name in NAMES))
    return found


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the test has left no process on a host, and undo what it did to them."""
    used = [
        request.getfixturevalue(name) for name in ("hosts", "slurm") if name in request.fixturenames
    ]
    yield
    left = [process for cluster in used for process in cluster.left(GRACE)]
    for cluster in used:
        cluster.mend()
    assert not left, f"left running on hosts {GRACE:g} s after the test: {left}"
