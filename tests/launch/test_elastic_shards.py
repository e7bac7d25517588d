"""Trainings that go on when a worker is lost, of whose optimizer's state each worker has a part."""

from __future__ import annotations

import pytest

from .conftest import Job
from .elastic_jobs import SCRIPT, alone, assert_same, result, until_one_joins

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

SHARDED = (
    SCRIPT.replace(
        'logdir="logs"', 'strategy=allhands.DDP(optimizer_state="sharded"), clip_norm=0.5'
    )
    .replace(
        """    SharedMeasures.share = behind
""",
        """    SharedMeasures.share = behind

    # "1@5:within": rank 1 is told of the loss after its own part of the update
    from allhands.strategies.ddp_exchange import DDPExchange

    bring = DDPExchange.updated

    def broken(self):
        if f"{os.environ.get('RANK')}@{loop.global_step}:within" in losses:
            losses.clear()
            raise RuntimeError("the connection is closed")
        bring(self)

    DDPExchange.updated = broken
""",
    )
    .replace('endswith((":behind", ":dies"))', 'endswith((":behind", ":within", ":dies"))')
)


LOSSES_OF_PARTS = pytest.mark.parametrize(
    "losses",
    [
        ["2@5:SIGKILL", "0@e2:SIGKILL"],
        ["1@4:SIGTERM"],
        # one has not begun the update that the other has made, and sent in vain
        ["2@5:dies", "0@5:behind", "1@5:within"],
        ["2@5:dies", "0@5:within", "1@5:within"],
    ],
    ids=" ".join,
)


def assert_no_part_is_lost(job: Job, text: str, losses: list[str]) -> None:
    """Three workers, of whom these are lost, train as one process does."""
    code, out, err = job.run("-n", "3", "--elastic", job.script(text), "4", "0", *losses)
    assert code == 0, out + err
    assert "each part of the optimizer's state is on two workers" in out
    found = result(job.folder)
    assert_same(found, alone(job.folder / "alone", text, 12))
    assert found[3] == 3 - sum("SIG" in word or "dies" in word for word in losses)


def assert_a_spare_gets_its_part(job: Job, joined: str, text: str) -> None:
    """Two workers, of whom one is lost and a spare takes its place, train as one process does."""
    words = ("-n", "2", "--spares", "1", "--elastic", job.script(joined), "6", "0.6")
    code, out, err = job.run(*words, "0@9:SIGKILL", timeout=150)
    assert code == 0, out + err
    assert "membership 2: 1 worker joined" in out
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", text, 12))


@LOSSES_OF_PARTS
def test_parts_of_the_optimizers_state_are_not_lost(job: Job, losses: list[str]) -> None:
    assert_no_part_is_lost(job, SHARDED, losses)


def test_a_worker_that_joins_gets_its_part_of_the_optimizers_state(job: Job) -> None:
    assert_a_spare_gets_its_part(job, until_one_joins(SHARDED), SHARDED)


def test_a_part_that_was_lost_twice_ends_the_training(job: Job) -> None:
    # of a world of 4, two neighbours; 1 and 3 would do
    script = job.script(SHARDED)
    code, out, err = job.run("-n", "4", "--elastic", script, "3", "0", "1@5:SIGKILL", "2@5:SIGKILL")
    assert code != 0
    assert "workers that keep the same part of the optimizer's state were lost at once" in out + err
    assert "--max-restarts" in out + err
