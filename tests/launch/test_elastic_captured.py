"""Trainings whose steps are captured, and that lose workers: captured again by those that are left,
with the same weights and metrics as one process that nothing disturbed. A function stands for each
CUDA graph, see `tests.function_graphs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Job
from .elastic_jobs import SCRIPT, alone, assert_same, result, until_one_joins
from .test_elastic_shards import SHARDED

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def captured(script: str, groups: int) -> str:
    """A script whose workers capture their steps, and replay some in each of the last groups, of
    which there are so many."""
    before = f"""
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.function_graphs import captured_on_processors

capturing = captured_on_processors()
graphs = capturing.__enter__()

"""
    after = f"""
if loop.world.world_size > 1:
    replays = [one.replays for one in graphs][-{groups} :]
    assert min(replays) >= 2, replays
if loop.main:
"""
    # The loop binds its strategy as it is made.
    start = script.index("loop = allhands.Loop(")
    changed = script[:start] + before + script[start:]
    return changed.replace("if loop.main:\n", after.lstrip("\n"), 1)


@pytest.mark.parametrize(
    ("script", "losses"),
    [
        (SCRIPT, ["2@5:SIGKILL"]),
        # one has taken the step that the other has not
        (SCRIPT, ["2@5:dies", "0@5:behind"]),
        (SHARDED, ["2@5:dies", "0@5:behind", "1@5:within"]),
    ],
    ids=["killed", "behind", "parts"],
)
def test_the_others_capture_their_steps_again(job: Job, script: str, losses: list[str]) -> None:
    text = captured(script, 2)
    code, out, err = job.run("-n", "3", "--elastic", job.script(text), "4", "0", *losses)
    assert code == 0, out + err
    assert out.count("step: captured in a CUDA graph") >= 2
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", script, 12))


def test_a_worker_that_joins_captures_its_steps(job: Job) -> None:
    text = captured(until_one_joins(SCRIPT), 1)
    words = ("-n", "2", "--spares", "1", "--elastic", job.script(text), "6", "0.6")
    code, out, err = job.run(*words, "0@9:SIGKILL", timeout=150)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", SCRIPT, 12))
