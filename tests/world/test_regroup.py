"""What a process reads of the memberships; and it ends where an operation of a group that was
aborted does not."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from allhands.errors import WorldError
from allhands.world import regroup
from allhands.world.regroup import KEY, OVER_KEY, Regrouping
from tests.patience import patience


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


def _reading(**memberships: dict[str, Any]) -> Regrouping:
    """A process that was started as rank 0, and is in membership 0."""
    regrouping = Regrouping.__new__(Regrouping)
    regrouping.epoch, regrouping._own, regrouping.outside = 0, 0, False
    regrouping._store = HashStore()
    for number, change in memberships.items():
        regrouping._store.set(f"{KEY}/{number.removeprefix('m')}", json.dumps(change))
    return regrouping


def test_one_that_waits_for_a_membership_hears_that_nobody_goes_on() -> None:
    regrouping = _reading()
    threading.Timer(0.3, lambda: regrouping._store.set(OVER_KEY, "killed by SIGKILL")).start()
    assert regrouping.newest(float("inf")) is None


def test_one_that_was_taken_for_lost_hears_that_the_others_train_without_it() -> None:
    regrouping = _reading(
        m1={"members": [0, 1], "lost": ["rank 2: killed by SIGKILL"]},
        m2={"members": [1], "lost": ["rank 0: lost with its host"]},
    )
    said = (
        "started as rank 0, was taken for lost, and the others train without it since membership 2"
    )
    with pytest.raises(WorldError, match=said):
        regrouping.newest(float("inf"))


def test_workers_that_wait_to_join_are_no_loss() -> None:
    joined = {"members": [0, 1, 2], "joined": [2]}
    lost = {"members": [0], "lost": ["rank 1: killed by SIGKILL"]}
    assert not _reading().has_lost()
    assert not _reading(m1=joined).has_lost()
    assert _reading(m1=lost).has_lost()
    assert _reading(m1=joined, m2=lost).has_lost()
