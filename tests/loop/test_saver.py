"""Saving in a thread; what it saves is tested in tests/faults/test_half_written.py."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from allhands.launch import worker
from allhands.loop.checkpoint import saver


def test_a_write_that_waits_for_a_lost_rank_is_not_joined_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = threading.Event()
    monkeypatch.setattr(saver, "_ABANDON_S", 0.1)
    monkeypatch.setattr(saver.Saver, "_check_same", lambda *_: lost.wait())
    monkeypatch.setattr(worker, "stuck_threads", set())
    one = saver.Saver(tmp_path)
    one.save({}, {}, {"epoch": 0}, None, False)
    one.abandon()
    (thread,) = worker.stuck_threads
    assert thread.is_alive()
    lost.set()
    thread.join()


def test_a_write_that_has_ended_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "stuck_threads", set())
    one = saver.Saver(tmp_path)
    path = one.save({}, {}, {"epoch": 0}, None, False)
    one.abandon()
    assert path.is_dir()
    assert not worker.stuck_threads
