"""Sizes of a job under Slurm that contradict each other are refused, with both."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from allhands import UserError
from allhands.launch.slurm import allocation, submit


@pytest.mark.parametrize(
    ("workers", "options", "message"),
    [
        (3, "--ntasks=4", r"-n 3 workers, but --sbatch asks for 4 tasks \(--ntasks=4\)"),
        (3, "-n4", "-n 3 workers, but --sbatch asks for 4 tasks"),
        (3, "-N 2 --ntasks-per-node 4", "asks for 8 tasks .--nodes=2 x --ntasks-per-node=4 = 8."),
        (
            None,
            "--ntasks=9 --nodes=2 --ntasks-per-node=4",
            "--ntasks=9, but --nodes=2 x --ntasks-per-node=4 = 8",
        ),
        (
            4,
            "-n 4 --gpus=2 --gpus-per-task=1",
            "--gpus=2, but 4 tasks .--ntasks=4. x --gpus-per-task=1 = 4",
        ),
    ],
)
def test_options_of_a_job_that_contradict_each_other(workers, options, message):
    with pytest.raises(UserError, match=message):
        submit(["script.py"], workers, shlex.split(options), wait=False)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (4, "--ntasks=4 --gpus=4 --gpus-per-task=1"),
        (5, "-n 5 -N 2 --ntasks-per-node=3"),  # at most 3 on each
        (2, "--nodes=2-4 --ntasks-per-node=3"),
        (None, "-N 2"),
    ],
)
def test_options_that_agree_are_passed_on(
    workers, options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen"
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\ncat > /dev/null\necho "$@" > {seen}\necho 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit(["script.py"], workers, shlex.split(options), wait=False) == 0
    assert options in seen.read_text()


def test_more_tasks_than_the_nodes_may_have():
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "6",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    with pytest.raises(UserError, match="6 tasks, but SLURM_NTASKS_PER_NODE=2 on 2 nodes makes 4"):
        allocation(environ)
    found = allocation(environ | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"})
    assert found is not None
    assert found.slots == [2, 2]
