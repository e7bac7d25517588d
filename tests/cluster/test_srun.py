"""Under a real Slurm: tasks of srun that join by themselves, workers a node, failures, signals and
requeues."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from allhands import SupervisedRunner
from tests.cluster.small_training import given, own_loop
from tests.cluster.srun_scripts import Scripts, until
from tests.patience import patience
from tests.reference import relative_difference

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
def scripts(slurm: Any) -> Iterator[Scripts]:
    scripts = Scripts(slurm)
    yield scripts
    scripts.call("scancel", "--user=root")  # what a test that failed has left


JOINS = """
import dataclasses, json, socket
import torch
import torch.distributed as dist
import allhands
from allhands import slurm
from tests.cluster.small_training import own_loop

told = slurm.setup()
assert slurm.setup() == told
dist.init_process_group("gloo", rank=told[0], world_size=told[2], init_method=told[3])
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
world = allhands.init(device="cpu")
dist.all_reduce(total)
weight = own_loop(12 // world.world_size)
print(json.dumps({"setup": told, "total": total.item(), "host": socket.gethostname(),
                  "weight": weight,
                  "world": [world.rank, world.local_rank, world.node_rank, world.world_size,
                            world.local_world_size],
                  "environment": world.environment}))
"""
UNEVEN = ("-N2 -n3", [[0, 0, 0, 3, 2], [1, 1, 0, 3, 2], [2, 0, 1, 3, 1]])
EVEN = (
    "-N2 --ntasks-per-node=2",
    [[0, 0, 0, 4, 2], [1, 1, 0, 4, 2], [2, 0, 1, 4, 2], [3, 1, 1, 4, 2]],
)


@pytest.mark.parametrize(
    "steps",
    # rare: a second step at the same time on the same hosts, which is a step like the first one.
    [[UNEVEN], pytest.param([EVEN, UNEVEN], marks=pytest.mark.rare)],
    ids=["alone", "beside another step"],
)
def test_tasks_join_by_themselves(scripts: Scripts, steps: list[tuple[str, Any]]) -> None:
    """An uneven step, and one of two tasks a node that runs at the same time on the same hosts."""
    scripts.write("joins.py", JOINS)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda step: scripts.srun(step[0], "joins.py"), steps))
    alone = own_loop(12)
    for done, (_, expected) in zip(ended, steps, strict=True):
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        told = sorted(map(json.loads, lines), key=lambda one: one["world"][0])
        assert [one["world"] for one in told] == expected
        size = len(expected)
        assert [one["setup"][:3] for one in told] == [
            [world[0], world[1], size] for world in expected
        ]
        assert {one["total"] for one in told} == {float(size * size)}
        assert {one["environment"] for one in told} == {"slurm"}
        for one in told:
            torch.testing.assert_close(one["weight"], alone, rtol=0, atol=1e-5)
        assert [one["host"] for one in told] == [f"d{world[2] + 1}" for world in expected]
        (address,) = {one["setup"][3] for one in told}
        assert re.fullmatch(r"tcp://d1:\d+", address)


FAILS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import allhands

world = allhands.init(device="cpu")
how, rest = sys.argv[1:]
total = torch.ones(1)
dist.all_reduce(total)
if world.rank == 1:
    print("failing at", time.time(), flush=True)
    if how == "raise":
        raise ValueError("planted fault")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
while rest == "collective":
    dist.all_reduce(total)
time.sleep(100)
"""
FAILURES = {
    ("raise", "sleep"): "failed first: raised ValueError: planted fault",
    ("exit", "sleep"): "failed first: left with exit code 3",
    (
        "kill",
        "collective",
    ): "failed first: is gone without a word: killed, crashed, or its host is down",
    ("stop", "sleep"): "failed first: has given no sign of life for",
}


@pytest.mark.parametrize(
    "failures",
    [
        [("kill", "collective")],
        # rare: launch/test_failures.py has them.
        pytest.param([case for case in FAILURES if case[0] != "kill"], marks=pytest.mark.rare),
    ],
    ids=["kill", "others"],
)
def test_a_failing_task_is_named_and_ends_the_step(
    scripts: Scripts, failures: list[tuple[str, str]]
) -> None:
    """srun itself would wait for the others for ever."""
    scripts.write("fails.py", FAILS)

    def run(case: tuple[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
        path = str(scripts.folder / "fails.py")
        done = scripts.srun("-N2 -n2", path, *case, env={"ALLHANDS_HEARTBEAT_TIMEOUT": "4"})
        return done, time.time() - float(re.findall(r"failing at (\S+)", done.stdout)[0])

    with ThreadPoolExecutor(len(failures)) as pool:
        found = list(pool.map(run, failures))
    for case, (done, seconds) in zip(failures, found, strict=True):
        message = FAILURES[case]
        assert re.search(rf"allhands: rank 1 \(d2, pid \d+\) {message}", done.stderr), (
            case,
            done.stderr,
        )
        assert done.returncode != 0, case
        assert seconds < patience(20), case
    until(
        lambda: not scripts.alive("fails.py"),
        5,
        lambda: f"left behind: {scripts.alive('fails.py')}",
    )


TRAINS = """
import os, sys, time
import torch
from allhands import Callback, SupervisedRunner
from tests.cluster.small_training import given


class Fails(Callback):
    def on_step_end(self, training):
        if training.world.rank == 3 and training.step == 2:
            raise ValueError("planted fault")


arguments = given(3)
history = SupervisedRunner().train(**arguments, logdir="nodes", distributed=True, workers=2)
torch.save(arguments["model"].state_dict(), f"task-{os.environ['SLURM_PROCID']}.pt")
devices = os.environ.get("CUDA_VISIBLE_DEVICES")
print("trained on", os.environ["SLURM_PROCID"], history["step"], devices, flush=True)
SupervisedRunner().train(**given(3), distributed=True, workers=2, callbacks=[Fails()])
"""


# rare: launch/test_nodes.py does the same with the variables that Slurm sets, and tasks of a real
# one join in the test before.
@pytest.mark.rare
def test_one_task_a_node_starts_the_workers_of_its_node(scripts: Scripts) -> None:
    scripts.write("trains.py", TRAINS)
    done = scripts.srun("-N2 --gres=gpu:2", "trains.py")
    assert (
        "allhands: srun started one task on each of 2 nodes: workers 2 on d1, 2 on d2"
        in done.stdout
    ), done.stderr
    assert done.stdout.count("ddp, 4 workers on cpu") == 2
    assert done.stdout.count("1/2 ") == 1, "the first training's table is printed by one task"
    for task in range(2):
        assert f"trained on {task} [5, 10] 0,1" in done.stdout
    assert sorted(path.name for path in (scripts.folder / "nodes").iterdir()) == [
        "checkpoints",
        "metrics.csv",
        "tensorboard",
    ]
    first, second = (
        torch.load(scripts.folder / f"task-{task}.pt", weights_only=True) for task in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = given(12)
    SupervisedRunner(device="cpu").train(**alone)
    assert relative_difference(first, alone["model"].state_dict()) < 1e-5
    # The second training fails on the other node, and ends both.
    assert done.returncode != 0
    assert (
        len(
            re.findall(
                r"WorkerError: rank 3 \(d2, pid \d+\) failed first: raised ValueError: planted "
                r"fault",
                done.stderr,
            )
        )
        == 2
    )


INTERRUPTED = """
import os, sys, time
import torch
from allhands import Callback, SupervisedRunner
from tests.cluster.small_training import given


class Slow(Callback):
    def on_step_end(self, training):
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        again = "SLURM_RESTART_COUNT" in os.environ and training.step == 12 + 5 * restarts
        if again and training.world.rank == 0:
            open(f"again-{restarts}", "w").close()
        if training.step == 7 and training.world.rank == 0:
            open("begun", "w").close()
        time.sleep(float(sys.argv[2]) if restarts < 2 else 0)


arguments = given(3, dropout=0.3) | {"num_epochs": 4, "callbacks": [Slow()]}
SupervisedRunner(device="cpu").train(**arguments, logdir=sys.argv[1])
if os.environ["SLURM_PROCID"] == "0":
    torch.save(arguments["model"].state_dict(), sys.argv[1] + ".pt")
"""
BATCH = """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 --output=job.out --open-mode=append --requeue
export ALLHANDS_REQUEUE=1
srun {python} interrupted.py cut 0.25
"""


# rare: loop/test_requeue.py has what is asked of Slurm, faults/test_resume.py the interrupted
# training.
@pytest.mark.rare
def test_a_job_that_is_signalled_and_then_preempted_goes_on_to_the_same_end(
    scripts: Scripts,
) -> None:
    scripts.write("interrupted.py", INTERRUPTED)
    scripts.write("job.sh", BATCH.format(python=sys.executable))

    def shown(name: str) -> str:
        text = scripts.call("scontrol", "show", "job", job).stdout
        return re.findall(rf"\b{name}=(\S+)", text)[0]

    def said() -> str:
        path = scripts.folder / "job.out"
        return (path.read_text() if path.exists() else "") + scripts.call(
            "scontrol", "show", "job", job
        ).stdout

    def starts_again(restarts: int) -> None:
        until(
            lambda: shown("JobState") == "PENDING" and shown("Restarts") == str(restarts), 40, said
        )
        # A requeued job is held back for two minutes. Within the second in which it was ended, its
        # nodes take it for the old one.
        time.sleep(1.5)
        scripts.call("scontrol", "update", f"jobid={job}", "StartTime=now")

    job = scripts.call("sbatch", "--parsable", "job.sh").stdout.strip()
    until((scripts.folder / "begun").exists, 40, said)
    scripts.call("scancel", "--signal=USR1", job)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(scripts.srun, "-N2 -n2", "interrupted.py", "whole", "0")
        starts_again(1)
        assert whole.result().returncode == 0, whole.result().stderr
    until((scripts.folder / "again-1").exists, 40, said)
    urgent = scripts.call(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--exclusive",
        "-N2",
        "--output=/dev/null",
        "--wrap=true",
    )
    assert urgent.returncode == 0, urgent.stderr
    starts_again(2)
    until(lambda: shown("JobState") == "COMPLETED", 40, said)
    out = (scripts.folder / "job.out").read_text()
    assert out.count("stopped by SIGUSR1 after optimizer step") == 1, out
    assert out.count("stopped by SIGTERM after optimizer step") == 1, out
    assert out.count(f"asking Slurm to requeue job {job}\n") == 2, out
    for restarts in (1, 2):
        assert (
            f"job {job} was requeued (restart {restarts}): going on with its own newest checkpoint"
            in out
        ), out
    cut, whole_state = (
        torch.load(scripts.folder / f"{name}.pt", weights_only=True) for name in ("cut", "whole")
    )
    differing = [name for name in whole_state if not torch.equal(cut[name], whole_state[name])]
    assert not differing, f"{differing}\n{out}"


def test_a_task_computes_with_the_cpus_that_slurm_gave_it(scripts: Scripts) -> None:
    scripts.write(
        "threads.py",
        "import torch, allhands\nallhands.init(device='cpu')\nprint(torch.get_num_threads())\n",
    )
    for options in ("-N1 -n2", "-N2 -n2"):
        done = scripts.srun(options, "threads.py", env={"OMP_NUM_THREADS": ""})
        assert done.stdout.split() == ["1", "1"], done.stderr
