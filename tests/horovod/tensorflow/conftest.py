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


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Two workers in which TensorFlow runs one operation at a time."""
    from tests.horovod.tensorflow.workers import started

    env = {"TF_NUM_INTEROP_THREADS": "1"}
    with started(tmp_path_factory.mktemp("one thread"), env=env) as two:
        yield two
