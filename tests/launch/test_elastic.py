"""Trainings that go on in their processes when a worker is lost: the same weights and metrics as
one process that nothing disturbed."""

from __future__ import annotations

import re
import signal

import pytest

from .conftest import Job
from .elastic_jobs import SCRIPT, Runner, alone, assert_same, result, until_one_joins

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


@pytest.mark.parametrize(
    "losses",
    [
        ["2@5:SIGKILL"],
        # rank 0, in whose place another prints and writes; then another, in an evaluation
        ["0@0:SIGKILL", "1@e2:SIGKILL"],
        ["1@3:SIGKILL", "2@3:SIGKILL"],
        ["1@4:SIGTERM"],
        # what waits in nccl for ever ends itself so
        ["1@4:stuck"],
        # rank 0 has not taken the step that rank 1 has, and the other way round
        ["2@5:dies", "0@5:behind"],
        ["2@5:dies", "1@5:behind"],
        # rank 1 asks the others meanwhile whether to go on, and rank 0 has that before it
        ["2@6:dies", "0@6:behind"],
        ["2@0:dies", "1@0:behind"],
    ],
    ids=" ".join,
)
def test_the_others_go_on_with_the_same_result(job: Job, losses: list[str]) -> None:
    code, out, err = job.run("-n", "3", "--elastic", job.script(SCRIPT), "4", "0", *losses)
    assert code == 0, out + err
    found = result(job.folder)
    assert_same(found, alone(job.folder / "alone", SCRIPT, 12))
    assert found[3] == 3 - sum(not word.endswith("behind") for word in losses)
    assert "workers repeat what was interrupted" in out or "1 worker repeat" in out
    rows = (job.folder / "logs" / "membership.csv").read_text().splitlines()
    assert rows[0].startswith("time,membership,step,workers,lost,joined,seconds")
    assert rows[1].partition(",")[2] == "0,,3,,0,0", "the beginning"
    assert len((job.folder / "logs" / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "strategy", ["KVStore()", "KVStore(update='worker')", "DDP(compress='bf16')"]
)
def test_other_strategies_go_on_too(job: Job, strategy: str) -> None:
    text = SCRIPT.replace('logdir="logs"', f"clip_norm=1.0, strategy=allhands.{strategy}")
    code, out, err = job.run(
        "-n", "3", "--elastic", job.script(text), "4", "0", "2@5:dies", "0@5:behind"
    )
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 2
    assert ("each worker keeps the whole state of the optimizer" in out) == (
        strategy == "KVStore()"
    )
    plain = text.replace(f"strategy=allhands.{strategy}", "strategy=None")
    # Gradients that are rounded to bf16 have other last bits with other shares.
    assert_same(found, alone(job.folder / "alone", plain, 12), 0.01 if "bf16" in strategy else 1e-5)


@pytest.mark.parametrize("compress", ["'int8'", "{'name': 'powersgd', 'rank': 1, 'start': 3}"])
def test_the_others_keep_what_compression_has_left_over(job: Job, compress: str) -> None:
    lossy = SCRIPT.replace('logdir="logs"', f"strategy=allhands.DDP(compress={compress})")
    # a matrix that powersgd makes smaller
    lossy = lossy.replace("Linear(6, 16)", "Linear(6, 64)").replace(
        "Linear(16, 3)", "Linear(64, 3)"
    )
    lossy = lossy.replace(
        "if loop.main:",
        """
left = loop.exchange.own_tensors()
assert "left/2.weight" in left and left["left/2.weight"].abs().sum() > 0
if loop.main:""",
    )
    words = ("-n", "3", "--elastic", job.script(lossy), "4", "0")
    code, out, err = job.run(*words, "2@9:dies", "0@9:behind")
    assert code == 0, out + err
    name = "powersgd" if "powersgd" in compress else "int8"
    assert f"gradients (compress='{name}') is lost with it, and the others go on" in out
    assert f"; what was left over there of gradients (compress='{name}') is lost" in out
    found = result(job.folder)
    assert found[3] == 2
    code, out, err = job.run("-n", "3", job.script(lossy), "4", "0")
    assert code == 0, out + err
    others = result(job.folder)
    assert found[1]["step"] == others[1]["step"]
    # Which rounding has taken, and not what another order of steps would have.
    losses = [history[1]["train"]["loss"] for history in (found, others)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_stopped_worker_counts_as_lost_and_one_in_its_place_joins(job: Job) -> None:
    longer = until_one_joins(SCRIPT.replace("epochs(3)", "epochs(8)"))
    words: tuple[str, ...] = ("-n", "2", "--elastic", "--max-restarts", "1", job.script(longer))
    words += ("6", "0.4", "1@3:SIGSTOP")
    code, out, err = job.run(*words, timeout=150)
    assert code == 0, out + err
    assert "1 worker joined; 2 workers go on" in out
    assert "started again (1 of 1)" in err
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", longer, 12))


# A worker that is started again is lost as the others wait for it, to make the group that saves.
LOST_AS_IT_JOINS = until_one_joins(SCRIPT.replace("epochs(3)", "epochs(12)")).replace(
    "for epoch in",
    """
if os.environ.get("ALLHANDS_ELASTIC_JOINS") and not os.path.exists("lost"):
    import torch.distributed as dist

    def new_group(*args, **options):
        for name in ("lost", "joined"):
            open(name, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

    dist.new_group = new_group
for epoch in""",
)


def test_a_worker_that_is_lost_as_it_joins_is_not_waited_for(job: Job) -> None:
    words = ("-n", "2", "--elastic", "--max-restarts", "1", job.script(LOST_AS_IT_JOINS), "6")
    code, out, err = job.run(*words, "0.3", "1@3:SIGKILL", timeout=150)
    assert code == 0, out + err
    assert (job.folder / "lost").exists()
    found = result(job.folder)
    assert found[3] == 1
    assert_same(found, alone(job.folder / "alone", LOST_AS_IT_JOINS, 12))


def test_a_spare_worker_takes_the_place_of_a_lost_one(job: Job) -> None:
    script = job.script(until_one_joins(SCRIPT))
    words = ("-n", "2", "--spares", "1", "--elastic", script, "6", "0.6", "0@9:SIGKILL")
    code, out, err = job.run(*words, timeout=150)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 2, "the spare one takes part"
    assert_same(found, alone(job.folder / "alone", SCRIPT, 12))
    assert re.search(r"membership 2: 1 worker joined", out)


@pytest.mark.parametrize("losses", [["1@4:SIGKILL", "0@e2:SIGKILL"]], ids=str)
def test_a_runners_training_goes_on_too(job: Job, losses: list[str]) -> None:
    script = job.script(Runner.SCRIPT)
    code, out, err = job.run("-n", "3", "--elastic", script, "4", "0", *losses)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 1
    assert_same(found, alone(job.folder / "alone", Runner.SCRIPT, 12))


def test_a_worker_that_joins_a_runners_training_gets_its_callbacks_state(job: Job) -> None:
    keeps = Runner.SCRIPT.replace(
        "    def on_step_end(self, training):",
        """\
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]
    def on_step_end(self, training):
        time.sleep(float(sys.argv[2]))""",
    ).replace("json, os, signal, sys", "json, os, signal, sys, time")
    keeps += """
if os.environ.get("ALLHANDS_ELASTIC_JOINS"):
    open("joined", "w").write(str(loses.steps))
"""
    words = ("-n", "2", "--spares", "1", "--elastic", job.script(keeps), "6", "0.6", "0@9:SIGKILL")
    code, out, err = job.run(*words, timeout=150)
    assert code == 0, out + err
    assert (job.folder / "joined").read_text() == "21"
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", Runner.SCRIPT, 12))


@pytest.mark.parametrize("loss", ["1@v8:SIGKILL", "0@10:SIGKILL"])
def test_evaluations_between_steps_are_repeated(job: Job, loss: str) -> None:
    often = Runner.SCRIPT.replace("    loaders={", "    evaluate_every=4, loaders={").replace(
        'self.maybe(f"e{training.epoch + 1}")', 'self.maybe(f"v{training.step}")'
    )
    code, out, err = job.run("-n", "3", "--elastic", job.script(often), "4", "0", loss)
    assert code == 0, out + err
    found = result(job.folder)
    assert found[3] == 2
    assert found[1]["step"] == [4, 8, 12, 16, 20, 21]
    assert_same(found, alone(job.folder / "alone", often, 12))


def test_what_cannot_go_on_says_why(job: Job) -> None:
    parted = SCRIPT.replace('logdir="logs"', 'strategy=allhands.KVStore(compress="int8")')
    code, out, err = job.run("-n", "3", "--elastic", job.script(parted), "4", "0", "2@5:SIGKILL")
    assert code != 0
    print(out + err)
    assert "cannot go on without starting again: KVStore(compress=" in (out + err)
    assert "--max-restarts" in out + err


def test_too_few_workers_save_and_the_next_job_goes_on_there(job: Job) -> None:
    script = job.script(SCRIPT.replace('logdir="logs"', 'logdir="logs", resume="auto"'))
    words = ("-n", "3", "--elastic", "--min-workers", "2", script, "4", "0.1")
    code, out, err = job.run(*words, "1@3:SIGKILL", "2@9:SIGKILL")
    assert code == 128 + signal.SIGKILL, out + err
    assert "was killed by SIGKILL" in err
    assert "1 worker left, fewer than --min-workers 2: told to save and end" in err
    saved = f"in epoch 2: saved in {job.folder / 'logs'}; go on with resume='auto'"
    assert re.search(rf"stopped by SIGTERM after optimizer step \d+, {re.escape(saved)}", out)
    assert re.search(r"allhands: rank 2 \(.*\) failed first: killed by SIGKILL", err)
    code, out, err = job.run(*words)
    assert code == 0, out + err
    assert_same(result(job.folder), alone(job.folder / "alone", SCRIPT, 12))


def test_too_few_workers_save_before_all_start_again(job: Job) -> None:
    script = job.script(SCRIPT.replace('logdir="logs"', 'logdir="logs", resume="auto"'))
    words = ("--elastic", "--min-workers", "2", "--max-restarts", "1", script, "6", "0.1")
    code, out, err = job.run("-n", "2", *words, "1@5:SIGKILL", timeout=120)
    assert code == 0, out + err
    assert "told to save and end" in err
    assert "restart 1 of 1" in err
    assert_same(result(job.folder), alone(job.folder / "alone", SCRIPT, 12))


# The script is replaced as a worker dies, and the others wait in epoch 2 for the end of the worker
# that runs the new one.
REPLACED = SCRIPT.replace(
    "            os.kill(",
    """\
            new = "import atexit; atexit.register(lambda: open('gone', 'w').close())" + chr(10)
            new += open(__file__).read()
            open(__file__, "w").write(new)
            os.kill(""",
).replace(
    "    maybe(f",
    """\
    while epoch.number == 2 and not os.path.exists("gone"):
        time.sleep(0.05)
    maybe(f""",
)


def test_a_worker_with_another_script_is_refused_by_name_and_the_others_go_on(job: Job) -> None:
    script = job.script(REPLACED)
    words = ("-n", "2", "--elastic", "--max-restarts", "3", script, "6", "0", "1@3:SIGKILL")
    code, out, err = job.run(*words, timeout=120)
    assert code == 0, out + err
    assert f"this worker cannot take part: its {script} is another version than the script" in err
    assert err.count("started again") == 1, "it would be refused again"
    assert re.search("the others (go on|came to their end)", err)
    found = result(job.folder)
    assert found[3] == 1
    assert_same(found, alone(job.folder / "alone", SCRIPT, 12))


def test_an_error_of_the_users_ends_the_job_at_once(job: Job) -> None:
    wrong = SCRIPT.replace("    maybe(f", "    1 / (loop.world.rank - 1)\n    maybe(f")
    code, _, err = job.run("-n", "2", "--elastic", job.script(wrong), "4", "0")
    assert code == 1
    assert "ZeroDivisionError" in err
