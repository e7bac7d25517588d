"""A host that is lost: the world goes on with the others, grows again when the host is back, and
misses no sample."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.launching import Launch, shared_folder

pytestmark = pytest.mark.usefixtures("forked_python")

# Every rank writes down which samples it sees, step by step.
TRAIN = """
import json, os, sys, time
import torch
from allhands import Callback, SupervisedRunner

class Recording(SupervisedRunner):
    def handle_batch(self, model, batch):
        x, y = batch
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        with open(f"seen-{attempt}-{rank}.jsonl", "a") as file:
            file.write(json.dumps([int(i) for i in x[:, 0]]) + "\\n")
        return model(x[:, 1:]), y

class Slow(Callback):
    def on_step_end(self, training):
        time.sleep(float(sys.argv[1]))

torch.manual_seed(0)
x = torch.randn(120, 5)
x[:, 0] = torch.arange(120)
data = torch.utils.data.TensorDataset(x, x[:, 1:].sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
history = Recording().train(
    model=model, criterion=torch.nn.MSELoss(), num_epochs=3,
    optimizer=torch.optim.SGD(model.parameters(), 0.01),
    datasets={"batch_size": 2, "train": data}, logdir="run", save_every=2,
    callbacks=[Slow()], distributed=True,
)
if os.environ["RANK"] == "0":
    print("END", len(history["epoch"]), flush=True)
"""


def seen(folder: Path, attempt: int) -> list[int]:
    """The samples of one attempt in their global order, over all steps that all of its ranks have
    begun."""
    files = sorted(folder.glob(f"seen-{attempt}-*.jsonl"))
    steps = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [sample for step in zip(*steps, strict=False) for share in step for sample in share]


# rare: launch/test_restarts.py starts a world again, faults/test_resume.py goes on with another
# number of workers, and hosts are lost in the tests below.
@pytest.mark.rare
def test_a_host_is_lost_and_comes_back_and_the_sample_order_goes_on(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "elastic")
    (folder / "train.py").write_text(TRAIN)
    with Launch(hosts, folder, "-n", "1", "train.py", "0") as job:
        code, said = job.end()
    assert code == 0, said
    whole = seen(folder, 0)
    assert [sorted(whole[start : start + 120]) for start in (0, 120, 240)] == [list(range(120))] * 3

    folder = shared_folder(hosts, "elastic")
    (folder / "train.py").write_text(TRAIN)
    words = (
        "-n 4 -H hosts --max-restarts 2 --min-workers 2 --host-timeout 3 --rejoin-timeout 1 "
        "--grace 4 train.py 0.1"
    )
    with Launch(hosts, folder, *words.split()) as job:
        job.until("1/3")
        hosts.poweroff("d2")
        job.until("going on with 2 workers")
        job.until("ddp, 2 workers")
        hosts.boot("d2")
        code, said = job.end(90)
    assert code == 0, said
    assert "rank 2 (d2, pid " in said
    assert "no word from host d2" in said
    assert "d2 is back" in said
    assert re.findall(r"ddp, (\d) workers", said) == ["4", "2", "4"], said
    assert "END 3" in said
    begun = 0
    for attempt in range(3):
        part = seen(folder, attempt)
        # Each attempt goes on with the very sample that follows its checkpoint, and nothing is left
        # out between two.
        starts = [start for start in range(begun + 1) if whole[start : start + len(part)] == part]
        assert part, attempt
        assert starts, (attempt, part)
        begun = starts[-1] + len(part)
    assert begun == len(whole)
    assert hosts.left(5) == []


def test_a_host_that_does_not_come_back_ends_a_job_that_needs_it(hosts: Hosts) -> None:
    folder = shared_folder(hosts, "needed")
    (folder / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    words = (
        "-n 2 -H hosts --no-preload --max-restarts 1 --host-timeout 3 --rejoin-timeout 1 wait.py"
    )
    with Launch(hosts, folder, *words.split()) as job:
        job.until("up", times=2)
        hosts.poweroff("d2")
        code, said = job.end(40)
    assert code == 1, said
    assert "d2 did not come back within 1 s" in said
    assert "workers left: 1, and all are needed (--min-workers lets it go on with fewer)" in said
    assert hosts.left(5) == []


ALONE = """
import os, signal, sys, time
from pathlib import Path

rank, restart = int(os.environ["RANK"]), int(os.environ["ALLHANDS_WORKER_RESTART"])
print("up", restart, flush=True)
if rank == 1 and os.environ["ALLHANDS_ON_WORKER_FAILURE"] == "restart" and restart == 0:
    os.kill(os.getpid(), signal.SIGKILL)
wanted = sys.argv[1]
while rank == 0 and not Path(wanted).exists() or rank == 1 and restart == 0:
    time.sleep(0.05)
Path("again").touch()
print("end", flush=True)
"""


def test_with_servers_one_worker_is_started_again_on_its_host_or_its_host_is_done_without(
    hosts: Hosts,
) -> None:
    folder = shared_folder(hosts, "alone")
    (folder / "alone.py").write_text(ALONE)
    words = [
        "-n",
        "2",
        "-s",
        "1",
        "-H",
        "hosts",
        "--no-preload",
        "--host-timeout",
        "3",
        "--on-worker-failure",
    ]
    with Launch(
        hosts, folder, *words, "restart", "--max-restarts", "1", "alone.py", "again"
    ) as job:
        code, said = job.end()
    assert code == 0, said
    assert (
        "rank 1 on host d2 was killed by SIGKILL (out of memory? see `dmesg`); started again (1 of "
        "1)" in said
    )
    assert (said.count("[d1 0] up 0"), said.count("[d2 1] up"), said.count("[d2 1] up 1")) == (
        1,
        2,
        1,
    )
    assert hosts.left(5) == []
    with Launch(hosts, folder, *words, "continue", "alone.py", "lost") as job:
        job.until("up", times=2)
        hosts.poweroff("d2")
        job.until("the others go on")
        (folder / "lost").touch()
        code, said = job.end()
    assert code == 0, said
    assert re.search(
        r"allhands: rank 1 on host d2 failed: no word from host d2 .*; the others go on", said
    )
    assert "[d1 0] end" in said
    assert (
        "allhands: 1 of 2 workers failed, and the others came to their end: rank 1 (d2): no word "
        "from host d2" in said
    )
    assert hosts.left(5) == []
