"""A world that fails is started again, with a store and a membership of its own, and goes on from
its checkpoint."""

from __future__ import annotations

import re

import pytest

from tests.patience import patience

from .conftest import Job

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# Raw gloo: a restarted rank that reads what a failed attempt left in the store dials addresses of
# processes that are gone.
WORLD = """
import os, signal, sys, time
import torch, torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
size, run = dist.get_world_size(), os.environ["TORCHELASTIC_RUN_ID"]
print(f"attempt {attempt} rank {rank} of {size} sum {total.item():.0f} run {run}")
dist.barrier()
if attempt < 6:
    if rank == attempt % 3:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        [kill, lambda: sys.exit(4), lambda: 1 / 0][attempt % 3]()
    dist.barrier()
dist.destroy_process_group()
"""


# rare: a world is started again in the test of a killed worker.
@pytest.mark.rare
def test_six_restarts_of_gloo_in_six(job: Job) -> None:
    code, out, err = job.run("-n", "3", "--max-restarts", "6", job.script(WORLD))
    assert code == 0, err
    lines = re.findall(r"\[(\d)\] attempt (\d) rank (\d) of 3 sum 6 run (\w+)", out)
    assert sorted(line[:3] for line in lines) == sorted(
        (str(r), str(a), str(r)) for a in range(7) for r in range(3)
    ), out
    assert len({line[3] for line in lines}) == 1, "it is one run"
    assert err.count("failed first") == 6
    assert "restart 6 of 6: the same hosts again" in err


def test_restarts_come_to_an_end_and_the_last_failure_decides(job: Job) -> None:
    code, _, err = job.run(
        "-n", "2", "--no-preload", "--max-restarts", "2", "--", "sh", "-c", "echo try $RANK; exit 5"
    )
    assert code == 5
    assert err.count("failed first: exit code 5") == 3
    assert err.count("| try") == 3, "the last lines are those of the attempt that failed"
    assert "restart 2 of 2" in err


def test_a_job_that_is_told_to_stop_is_not_restarted(job: Job) -> None:
    process = job.start(
        "-n", "2", "--no-preload", "--max-restarts", "5", "--", "sh", "-c", "echo up; exec sleep 60"
    )
    assert process.stdout is not None
    assert b"up" in process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=patience(30))
    assert process.returncode == 143
    assert b"restart" not in err


TRAIN = """
import os, signal, sys
import torch
from allhands import Callback, SupervisedRunner

class Die(Callback):
    def on_step_end(self, training):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if training.step == 9 and training.world.rank == 1 and first:
            if "--die" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(1)
x = torch.randn(101, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
history = SupervisedRunner().train(
    model=model, criterion=torch.nn.MSELoss(), num_epochs=3,
    optimizer=torch.optim.Adam(model.parameters(), 0.01),
    datasets={"batch_size": 8, "train": data}, logdir=sys.argv[1], save_every=2,
    callbacks=[Die()], distributed=True,
)
if os.environ["RANK"] == "0":
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = weights.double()
    print("END", history["step"], weights.sum().item().hex(), weights.square().sum().item().hex())
"""


def test_a_killed_worker_costs_nothing_but_time(job: Job) -> None:
    script = job.script(TRAIN)
    code, whole, err = job.run("-n", "2", script, "whole")
    assert code == 0, err
    code, restarted, err = job.run("-n", "2", "--max-restarts", "1", script, "restarted", "--die")
    assert code == 0, err
    assert "rank 1" in err
    assert "killed by SIGKILL" in err
    assert "going on with its own newest checkpoint" in restarted
    assert re.findall("END.*", restarted) == re.findall("END.*", whole)
    assert re.findall("END.*", whole)


SERVERS = """
import json, os, sys, time
from pathlib import Path

lines = []
while len(lines) < 2:
    time.sleep(0.02)
    lines = Path("servers").read_text().splitlines() if Path("servers").exists() else []
pids = {one["ALLHANDS_SERVER"]: one["pid"] for one in map(json.loads, lines)}
if sys.argv[1:]:
    os.kill(pids["1"], 9)
    time.sleep(30)
time.sleep(0.5 * int(os.environ["RANK"]))
print("still there", all(Path("/proc", str(pid)).exists() for pid in pids.values()), flush=True)
"""


def test_servers_serve_until_the_last_worker_has_ended_and_their_death_is_a_failure(
    job: Job,
) -> None:
    job.fake_servers()
    words = ["-n", "2", "-s", "2", "--no-preload", job.script(SERVERS)]
    code, out, err = job.run(*words)
    assert (code, out.count("still there True"), err) == (0, 2, "")
    (job.folder / "servers").unlink()
    code, out, err = job.run(*words, "kill")
    assert code == 137
    assert "allhands: server 1 (" in err
    assert "failed first: killed by SIGKILL" in err
