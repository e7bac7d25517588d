"""Real workers beside real servers that are killed, stopped, raise or leave: each loss is named in
time, or gone on from."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from allhands.kvstore.credentials import key
from tests.kvstore.failing_workers import BEGIN, HOST, WITHIN, launched, reference, same
from tests.launch.conftest import Job
from tests.patience import patience

pytestmark = pytest.mark.serial

# ------------------------------------------------------------------ a loss that stops all

# One program that forks a pair of workers for each case: a survivor, and one that fails.
PAIRS = (
    BEGIN
    + """
from allhands.kvstore.store_modes import mode_named
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore

WHERE, CASES = json.loads(sys.argv[1]), json.loads(sys.argv[2])


def ended(children, seconds):
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(children) and time.monotonic() < end:
        for name, pid in children.items():
            if name not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[name] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return codes


def case_of_this_process():
    # All cases of one way to fail at once; their stores are others of the same servers.
    for how in dict.fromkeys(how for how, _ in CASES):
        children = {}
        for number, (one, when) in enumerate(CASES):
            for rank in (0, 1) if one == how else ():
                pid = os.fork()
                if pid == 0:
                    return number, rank, when, how
                children[f"{number}-{rank}"] = pid
        survivors = {name: pid for name, pid in children.items() if name.endswith("-0")}
        note(f"survivors-{how}", ended(survivors, 100.0))
        failed = {name: pid for name, pid in children.items() if name not in survivors}
        for pid in failed.values():
            if how == "SIGSTOP":
                os.kill(pid, signal.SIGCONT)
        note(f"failed-{how}", ended(failed, 100.0))
    return None


case = case_of_this_process()
if case is None:
    sys.exit()
number, rank, when, how = case
mode = mode_named("dist")
store = ServedStore(mode, rank, 2, WHERE, rules_of(mode, {}), number, f"{number}-{rank}")
weights = joined(store)
for step in range(2):
    update(store, weights, step)
# One that fails while the other still waits for the step before would be told of in that step.
if rank == 0:
    note(f"ready-{number}", True)
while not Path(f"ready-{number}").exists():
    time.sleep(0.01)
if rank == 1:
    fail_at(store, 2, when, how, f"fault-{number}")
    if when == "at exit":
        sys.exit()
    update(store, weights, 2)
    sys.exit("it was let go on")
if when == "in a barrier":
    time.sleep(0.6)  # until the other one is in it, and fails
told, taken = [], 0
while len(told) < 2:  # the call after it is told the same
    try:
        store.barrier() if when == "in a barrier" else None
        update(store, weights, 2)
        taken += 1
    except WorldError as error:
        told.append([time.monotonic(), str(error)])
note(f"told-{number}", [taken, *told])
os._exit(0)  # to take torch down properly takes long, ten times at once
"""
)
HOWS = ("SIGKILL", "exception", "SIGSTOP")
WHENS = ("before push", "mid-chunk", "after push", "in a barrier", "at exit")


@pytest.fixture
def servers(mark: str, short_lease: None, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Two servers of a job of two workers, started with the variables that the launcher gives
    them."""
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WORLD_SIZE": "2",
            "ALLHANDS_NUM_SERVERS": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting.port),
            "ALLHANDS_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
        }.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "allhands.kvstore.parameter_server"]
        started = [
            subprocess.Popen(command, env={**os.environ, "ALLHANDS_SERVER": str(number)})
            for number in range(2)
        ]
        try:
            yield [json.loads(meeting.get(key(number))) for number in range(2)]
            assert [server.poll() for server in started] == [None, None], "they serve on"
        finally:
            for server in started:
                server.terminate()
            codes = [server.wait(patience(5.0)) for server in started]
        assert codes == [0, 0]


def test_wherever_a_worker_fails_the_others_are_told_its_name_and_why(
    servers: list[dict[str, Any]], tmp_path: Path
) -> None:
    cases = [(how, when) for how in HOWS for when in WHENS]
    script = tmp_path / "pairs.py"
    script.write_text(PAIRS)
    done = subprocess.run(
        [sys.executable, "-P", str(script), json.dumps(servers), json.dumps(cases)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for how in HOWS:
        numbers = [number for number, (one, _) in enumerate(cases) if one == how]
        survivors = json.loads((tmp_path / f"survivors-{how}").read_text())
        assert survivors == {f"{number}-0": 0 for number in numbers}, done.stderr
        codes = json.loads((tmp_path / f"failed-{how}").read_text())
        # One that was stopped, and goes on later, is refused; where nothing was left to do it just
        # ends.
        late = {f"{number}-1": int(cases[number][1] != "at exit") for number in numbers}
        assert (
            codes
            == {
                "SIGKILL": dict.fromkeys(late, -9),
                "exception": dict.fromkeys(late, 1),
                "SIGSTOP": late,
            }[how]
        )
    for number, (how, when) in enumerate(cases):
        fault = json.loads((tmp_path / f"fault-{number}").read_text())
        taken, *told = json.loads((tmp_path / f"told-{number}").read_text())
        assert taken <= (when == "after push"), (
            "a push that came whole may count, the next step not"
        )
        why = (
            "no sign of life for" if how == "SIGSTOP" else "its connection ended without a goodbye"
        )
        for at, text in told:
            assert re.search(rf"worker 1 \(host {HOST}, process \d+\) is lost: {why}", text), (
                how,
                when,
                text,
            )
            assert at - fault < patience(WITHIN), (how, when)


@pytest.mark.parametrize(
    ("how", "when", "code", "said"),
    [
        pytest.param("exit", "in a barrier", 3, "exit code 3", marks=pytest.mark.rare),
        ("exception", "mid-chunk", 1, "raised ValueError: planted"),
    ],
)
def test_a_job_of_the_launcher_ends_with_the_code_of_the_worker_that_failed(
    job: Job, how: str, when: str, code: int, said: str
) -> None:
    text = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to hear what the store says
store = kv.create("dist")
weights = joined(store)
update(store, weights, 0)
if store.rank == 0:
    note("ready", True)
while not Path("ready").exists():
    time.sleep(0.01)
if store.rank == 1:
    fail_at(store, 1, {when!r}, {how!r}, "fault")
time.sleep(0.6)
try:
    update(store, weights, 1)
except WorldError as error:
    note("told", [time.monotonic(), str(error)])
"""
    found, out, told = launched(job, text, "-n", "2", "-s", "2")
    assert (found, told[-1]) == (code, f"allhands: rank 1 ({HOST}, PID) failed first: {said}"), out
    at, text = json.loads(Path("told").read_text())
    assert "worker 1 (" in text
    assert "is lost: its connection ended without a goodbye" in text
    assert at - json.loads(Path("fault").read_text()) < patience(WITHIN)


# -------------------------------------------------------------- a loss after which the others go on

GOES_ON = """
store = kv.create("dist")
weights = joined(store)
# Who fails after how many whole steps, where, and how; rank 1 only has fewer batches.
FAILS = {
    6: (1, "before push", "SIGKILL"), 5: (2, "mid-chunk", "SIGSTOP"),
    4: (3, "after push", "exception"), 3: (4, "in a barrier", "exit"),
    2: (5, "at exit", "SIGKILL"), 1: (6, None, None),
}
last, when, how = FAILS.get(store.rank, (9, None, None))
ends, workers = [], []
for step in range(last):
    if step == 4:  # one leaves in the midst of this barrier
        time.sleep(0.6)
        store.barrier()
    workers.append(update(store, weights, step).workers)
    ends.append(time.monotonic())
if when:
    fail_at(store, last, when, how, f"fault-{store.rank}")
    sys.exit()
note(f"ends-{store.rank}", [ends, workers])
torch.save(weights, f"weights-{store.rank}.pt")
"""


def test_the_others_go_on_without_workers_that_fail_in_any_way(job: Job) -> None:
    code, out, told = launched(
        job, GOES_ON, "-n", "7", "-s", "2", "--on-worker-failure", "continue"
    )
    assert code == 0, out
    assert told[-1].startswith(
        "allhands: 5 of 7 workers failed, and the others came to their end: "
    )
    ended = re.sub(r"no progress for \d+ s", "no progress for N s", told[-1])
    reasons = {
        2: "had finished with exit code 0, then SIGKILL ended it while Python shut down",
        3: "exit code 3",
        4: "raised ValueError: planted",
        5: "no progress for N s: it is stopped",
        6: "killed by SIGKILL",
    }
    for rank, why in reasons.items():
        assert f"rank {rank} ({HOST}): {why}" in ended
    # The one that failed after its push counts in that step.
    took_part = [set(range(count)) for count in (7, 6, 5, 5, 3, 2, 1, 1, 1)]
    for rank, steps in ((0, 9), (1, 6)):
        ends, workers = json.loads(Path(f"ends-{rank}").read_text())
        assert workers == [len(ranks) for ranks in took_part[:steps]]
        for failed, step in {6: 1, 5: 2, 4: 3, 3: 4, 2: 5}.items():
            assert ends[step] - json.loads(Path(f"fault-{failed}").read_text()) < patience(
                WITHIN
            ), (
                rank,
                failed,
            )
        assert same(Path(f"weights-{rank}.pt"), reference(took_part[:steps])), rank


# ------------------------------------------------------ no failure: fewer batches, nothing to do

UNEVEN = """
store = kv.create("dist")
weights = joined(store)
workers = [update(store, weights, step).workers for step in range(5 if store.rank == 0 else 3)]
if store.rank == 0:
    time.sleep(0.3)
    pids = [link.where["pid"] for link in store.links]
    fields = lambda pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = lambda: [sum(map(int, fields(pid)[11:13])) for pid in pids]
    before, began = used(), time.monotonic()
    time.sleep(2.0)
    seconds = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK")
    note("used", [(now - then) / seconds for then, now in zip(before, used())])
note(f"workers-{store.rank}", workers)
torch.save(weights, f"weights-{store.rank}.pt")
"""


def test_a_worker_with_fewer_batches_leaves_and_servers_that_wait_use_no_core(job: Job) -> None:
    code, out, told = launched(job, UNEVEN, "-n", "2", "-s", "2")
    assert (code, told) == (0, []), out
    took_part = [{0, 1}] * 3 + [{0}] * 2
    for rank, steps in ((0, 5), (1, 3)):
        assert json.loads(Path(f"workers-{rank}").read_text()) == [2, 2, 2, 1, 1][:steps]
        assert same(Path(f"weights-{rank}.pt"), reference(took_part[:steps]))
    # It is below 1 % on a machine that does nothing else; one that polls would use a whole core.
    assert max(json.loads(Path("used").read_text())) < 0.05
