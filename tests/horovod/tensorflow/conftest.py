"""These tests run in an environment with TensorFlow: make test-tensorflow. Elsewhere they are not
collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Two workers for all tests, see `tests.horovod.tensorflow.workers`."""
    from tests.horovod.tensorflow.workers import started

    with started(tmp_path_factory.mktemp("workers")) as two:
        yield two


@pytest.fixture(scope="module", params=[2, 3])
def one_thread(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    """Two workers, and three, in which TensorFlow runs one operation at a time."""
    from tests.horovod.tensorflow.workers import started

    env = {"TF_NUM_INTEROP_THREADS": "1"}
    with started(tmp_path_factory.mktemp("one thread"), request.param, env) as made:
        yield made
