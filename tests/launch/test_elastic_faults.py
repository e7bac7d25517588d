"""Elastic jobs in which more is lost than one worker at a time: one while the group is made anew,
and the launcher."""

from __future__ import annotations

import pytest

from tests.patience import patience

from .conftest import Job, wait_until
from .elastic_jobs import SCRIPT, alone, assert_same, result

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# Rank 2 is lost as the others make the group without rank 1: before it has met them, or after it.
LOST_AS_IT_REGROUPS = SCRIPT.replace(
    "for epoch in",
    """
from allhands.world import group
from allhands.world.regroup import Regrouping

def lost(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "2":
    of, name = {"enters": (Regrouping, "leave"), "connects": (group, "make_group")}[losses.pop()]
    setattr(of, name, lost)
for epoch in""",
)


@pytest.mark.parametrize(
    "where",
    [
        "enters",
        # takes the 30 s in which a group is to connect, as another test of test_elastic.py does
        pytest.param("connects", marks=pytest.mark.rare),
    ],
)
def test_one_that_is_lost_while_the_group_is_made_anew_is_left_out_too(
    job: Job, where: str
) -> None:
    script = job.script(LOST_AS_IT_REGROUPS)
    words = ("-n", "3", "--elastic", script, "4", "0", "1@5:SIGKILL", where)
    code, out, err = job.run(*words, timeout=120)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 1
    assert_same(found, alone(job.folder / "alone", SCRIPT, 12))
    assert "1 worker repeats what was interrupted" in out


def test_no_worker_outlives_the_launcher(job: Job) -> None:
    trains = SCRIPT.replace("epochs(3)", "epochs(1000)").replace(
        "        loop.step(",
        "        open(f'trains-{os.environ[\"RANK\"]}', 'w').close()\n        loop.step(",
    )
    process = job.start("-n", "2", "--spares", "1", "--elastic", job.script(trains), "6", "0.1")
    assert wait_until(lambda: len(list(job.folder.glob("trains-*"))) == 2, 60)
    process.kill()
    process.communicate(timeout=patience(20))
    assert wait_until(lambda: not job.alive(), 20)
