"""A process ends where an operation of a group that was aborted does not."""

from __future__ import annotations

import threading

import pytest
import torch

from allhands.world import regroup
from allhands.world.regroup import Regrouping
from tests.timeouts import patience


def _stuck(work: threading.Thread, left: threading.Event, seconds: float) -> list[str]:
    """What a `Regrouping` says whose training is in this thread, until that has left the group or
    so many seconds are over."""
    said: list[str] = []
    regrouping = Regrouping.__new__(Regrouping)
    regrouping._is_nccl, regrouping._trains_in = True, work.ident or 0

    def on_stuck(line: str) -> None:
        said.append(line)
        left.set()

    regrouping._on_stuck = on_stuck
    threading.Timer(seconds, left.set).start()
    regrouping._end_where_stuck(left)
    return said


def test_one_that_waits_on_in_an_operation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup, "_ABORT_S", 1.5)
    future: torch.futures.Future[int] = torch.futures.Future()
    work = threading.Thread(target=future.wait, daemon=True)
    work.start()
    said = _stuck(work, threading.Event(), patience(60))
    assert len(said) == 1
    assert "did not end within 2 s after its process group was aborted" in said[0]
    future.set_result(1)


def test_one_that_is_in_the_users_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup, "_ABORT_S", 0.5)
    over = threading.Event()
    work = threading.Thread(target=over.wait, daemon=True)
    work.start()
    assert _stuck(work, threading.Event(), 4.0) == []
    over.set()
