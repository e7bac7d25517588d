"""What is written and drawn of the changes of a world's members."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.loop import loggers
from allhands.loop.loggers import Loggers
from allhands.loop.membership_log import MembershipLog, read_rows
from allhands.world.regroup import Membership


class Training:
    """What is asked of a loop."""

    def __init__(self, logdir: Path | None, workers: int) -> None:
        self.lines: list[str] = []
        self.reporter = SimpleNamespace(line=self.lines.append)
        self.world = SimpleNamespace(rank=0, world_size=workers)
        self.settings = SimpleNamespace(logdir=logdir)
        self.global_step, self.counted = 0, "optimizer step"


def log_of(training: Any) -> MembershipLog:
    return MembershipLog(training)


def test_a_job_is_written_from_its_beginning_by_whoever_is_the_first_rank(tmp_path: Path) -> None:
    training = Training(tmp_path, 3)
    first, second = log_of(training), log_of(training)
    training.world.world_size, training.global_step = 2, 7
    first.add(Membership(1, (0, 2), ("rank 1 on a: killed",)), 0.25, True)
    assert training.lines == [
        "membership 1: lost rank 1 on a: killed; 2 workers repeat what was interrupted after "
        "optimizer step 7 (0.25 s)"
    ]
    training.world.world_size, training.global_step = 3, 9
    second.add(Membership(2, (0, 2, 1), (), (1,)), 0.5, False)
    names = ("membership", "step", "workers", "lost", "joined", "seconds")
    assert [[row[name] for name in names] for row in read_rows(tmp_path / "membership.csv")] == [
        ["0", "", "3", "", "0", "0"],
        ["1", "7", "2", "rank 1 on a: killed", "0", "0.250"],
        ["2", "9", "3", "", "1", "0.500"],
    ]


def test_a_job_that_goes_on_from_a_checkpoint_begins_anew_in_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        training = Training(tmp_path, 2)
        log = log_of(training)
        training.world.world_size = 1
        log.add(Membership(1, (0,), ("rank 1 on a: killed",)), 0.1, True)
        assert "; 1 worker repeats what was interrupted after" in training.lines[0]
        time.sleep(0.01)  # times are written in milliseconds
    numbers = [row["membership"] for row in read_rows(tmp_path / "membership.csv")]
    assert numbers == ["0", "1", "0", "1"]


def test_other_ranks_and_trainings_without_logdir_write_nothing(tmp_path: Path) -> None:
    for training in (Training(None, 2), Training(tmp_path, 2)):
        training.world.rank = int(training.settings.logdir is not None)
        log_of(training).add(Membership(1, (0,), ("gone",)), 0.1, True)
        assert training.lines
    assert read_rows(tmp_path / "membership.csv") == []


def test_the_picture_is_drawn_as_the_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv(loggers.VARIABLE, "1")
    log_of(Training(tmp_path, 2)).add(Membership(1, (0,), ("rank 1 on a: killed",)), 0.1, True)
    Loggers(tmp_path).close()
    assert not (tmp_path / "membership.png").exists(), "the job is not elastic"
    monkeypatch.setenv("ALLHANDS_ELASTIC", "2")
    Loggers(tmp_path).close()
    assert (tmp_path / "membership.png").exists()
