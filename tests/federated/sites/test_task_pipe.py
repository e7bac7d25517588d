"""The pipe between a site's SuperNode and its superexec."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from allhands.federated.sites import task_pipe
from allhands.federated.sites.task_pipe import TaskReader, TaskWriter
from tests.patience import patience

LONG = 1000.0


@pytest.fixture
def ends():
    reader, writer = os.pipe()
    yield (
        TaskReader({task_pipe.VARIABLE: str(reader)}),
        TaskWriter({task_pipe.VARIABLE: str(writer)}),
        writer,
    )
    for handle in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(handle)


def test_whoever_waits_is_woken_by_a_task_that_comes_before_or_meanwhile(ends):
    reader, writer, _ = ends
    writer.tell()
    writer.tell()
    waiting = threading.Thread(target=lambda: (reader.wait(LONG), reader.wait(LONG)), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()  # both were for one wait
    writer.tell()
    waiting.join(patience(20))
    assert not waiting.is_alive()
    assert reader.connected


def test_telling_never_waits(ends):
    _, writer, _ = ends
    for _ in range(70_000):  # more than the system keeps
        writer.tell()


def test_a_wait_ends_with_the_seconds_and_is_a_sleep_when_nobody_tells_any_more(ends, monkeypatch):
    reader, _, handle = ends
    reader.wait(0.01)
    assert reader.connected
    os.close(handle)
    reader.wait(LONG)
    assert not reader.connected
    sleeps = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    reader.wait(LONG)
    assert sleeps == [LONG]


def test_without_the_variable_nobody_is_told_and_waiting_is_sleeping(monkeypatch):
    TaskWriter({}).tell()
    sleeps = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    TaskReader({}).wait(3.0)
    assert sleeps == [3.0]
