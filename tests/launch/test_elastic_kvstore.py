"""Stores without servers that hold the optimizer, and go on when a worker is lost: the same weights
and metrics as one process that nothing disturbed."""

from __future__ import annotations

import pytest

from .conftest import Job
from .elastic_jobs import SCRIPT as OWN_STEPS
from .elastic_jobs import Runner, alone, assert_same, result
from .test_elastic_shards import (
    LOSSES_OF_PARTS,
    assert_a_spare_gets_its_part,
    assert_no_part_is_lost,
)

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# "1@5:within": rank 1 is told of the loss after its own part of the update.
SCRIPT = (
    OWN_STEPS.replace('logdir="logs"', 'strategy=allhands.KVStore(update="store"), clip_norm=0.5')
    .replace(
        """    SharedMeasures.share = behind
""",
        """    SharedMeasures.share = behind

    from allhands.kvstore.local_store import LocalStore

    spread = LocalStore._spread

    def broken(self, *args):
        if f"{os.environ.get('RANK')}@{loop.global_step}:within" in losses:
            losses.clear()
            raise RuntimeError("the connection is closed")
        spread(self, *args)

    LocalStore._spread = broken
""",
    )
    .replace('endswith((":behind", ":dies"))', 'endswith((":behind", ":within", ":dies"))')
)


@LOSSES_OF_PARTS
def test_the_others_have_the_lost_workers_part_of_the_store(job: Job, losses: list[str]) -> None:
    assert_no_part_is_lost(job, SCRIPT, losses)


def test_a_worker_that_joins_gets_its_part_of_the_store(job: Job) -> None:
    assert_a_spare_gets_its_part(job, SCRIPT, SCRIPT)


def test_a_stopped_worker_is_lost_and_one_in_its_place_gets_its_part(job: Job) -> None:
    script = job.script(SCRIPT.replace("epochs(3)", "epochs(8)"))
    words = ("-n", "3", "--elastic", "--max-restarts", "1", script, "4", "0.4", "1@3:SIGSTOP")
    code, out, err = job.run("--heartbeat-timeout", "3", *words, timeout=150)
    assert code == 0, out + err
    assert "1 worker joined" in out
    found = result(job.folder)
    assert found[3] == 3
    undisturbed = alone(job.folder / "alone", SCRIPT.replace("epochs(3)", "epochs(8)"), 12)
    assert_same(found, undisturbed)


def test_a_runners_training_goes_on_too(job: Job) -> None:
    stored = Runner.SCRIPT.replace(
        "num_epochs=3,", "num_epochs=3, distributed=allhands.KVStore(update='store'),"
    )
    losses = ["1@4:SIGKILL", "0@e2:SIGKILL"]
    code, out, err = job.run("-n", "3", "--elastic", job.script(stored), "4", "0", *losses)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 1
    assert_same(found, alone(job.folder / "alone", Runner.SCRIPT, 12))


def test_a_part_that_was_lost_twice_ends_the_training(job: Job) -> None:
    # of a world of 4, two neighbours; 1 and 3 would do
    script = job.script(SCRIPT)
    code, out, err = job.run("-n", "4", "--elastic", script, "3", "0", "1@5:SIGKILL", "2@5:SIGKILL")
    assert code != 0
    assert "workers that keep the same part of the optimizer's state were lost at once" in out + err
    assert "with them that of '0.weight'" in out + err
