"""What ends in the midst of a round: all workers by Ctrl-C, or a server that is killed."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.kvstore.failing_workers import BEGIN, HOST, WITHIN, launched, reference, same
from tests.launch.conftest import Job, wait_until
from tests.patience import patience

pytestmark = pytest.mark.serial

MID_ROUND = """
rules = json.loads(sys.argv[1])
store = kv.create("dist", **rules)
weights = joined(store, optimizer=bool(rules))
step = 0
while step < 6:
    if step == 3 and store.rank == 1 and not Path("fault").exists():
        time.sleep(0.4)  # the other one has pushed, and waits
        CUT
    step = update(store, weights, step).number
torch.save(weights, f"weights-{store.rank}.pt")
"""


# rare: launch/test_failures.py has Ctrl-C, and the tests beside this one the end of servers.
@pytest.mark.rare
def test_ctrl_c_ends_all_in_the_midst_of_a_round(job: Job) -> None:
    cut = 'note("fault", 0); time.sleep(30)'
    process = job.start(
        "-n", "2", "-s", "2", job.script(BEGIN + MID_ROUND.replace("CUT", cut)), "{}"
    )
    assert wait_until(Path("fault").exists, 30)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=patience(20))
    assert (process.returncode, err.decode()) == (
        130,
        "allhands: stopped by SIGINT; no worker is left\n",
    )
    assert wait_until(lambda: not job.alive(), 5)
    assert time.monotonic() - began < patience(5.0)


KILL = 'note("fault", time.monotonic()); os.kill(store.links[1].where["pid"], signal.SIGKILL)'


def test_a_server_that_is_killed_in_mid_round_is_named(job: Job) -> None:
    text = MID_ROUND.replace("CUT", KILL).replace(
        "    step = update(store, weights, step).number",
        """    try:
        step = update(store, weights, step).number
    except WorldError as error:
        note(f"told-{store.rank}", [time.monotonic(), str(error)])
        raise""",
    )
    code, out, told = launched(
        job, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + text, "-n", "2", "-s", "2"
    )
    assert code == 137, out
    assert told[-1].startswith(f"allhands: server 1 ({HOST}, PID) failed first: killed by SIGKILL")
    named = []
    for rank in range(2):
        at, said = json.loads(Path(f"told-{rank}").read_text())
        named.append(
            re.fullmatch(
                rf"server 1 \(host {HOST}, process \d+\) is gone: its connection ended(; worker \d "
                r".*)?",
                said,
            )
        )
        # The other server may tell a rank that is slow of the worker that has ended by then.
        assert named[-1] or re.match(
            rf"worker {1 - rank} \(host {HOST}, process \d+\) is lost: its connection ended", said
        )
        assert at - json.loads(Path("fault").read_text()) < patience(WITHIN)
    assert any(named)


def test_a_server_that_is_killed_in_mid_round_comes_back_from_a_snapshot(job: Job) -> None:
    ready = (
        "\n        while not all(3 in link.ask('snapshots')['steps'] for link in store.links): "
        "time.sleep(0.01)\n        "
    )
    rules = json.dumps({"snapshot_every": 1, "snapshot_dir": "snapshots"})
    words = ("-n", "2", "-s", "2", "--server-restarts", "1")
    code, out, told = launched(job, MID_ROUND.replace("CUT", ready + KILL), *words, argument=rules)
    assert code == 0, out
    assert "all go on from step 3, of which there is a snapshot" in out
    assert len(told) == 1
    assert told[0].endswith("started again (1 of 1)")
    for rank in range(2):
        assert same(Path(f"weights-{rank}.pt"), reference([{0, 1}] * 6))
