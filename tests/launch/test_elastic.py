"""Trainings that go on in their processes when a worker is lost: the same weights and metrics as
one process that nothing disturbed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.timeouts import patience

from .conftest import Job

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# How each worker is to be lost: words like "2@13:SIGKILL", the rank under which it was started, and
# the steps (or "e1", the epoch whose evaluation follows) before it. "0@5:behind": rank 0 is told of
# the loss in the step after 5, before its update, and the others after theirs. "2@5:dies": so does
# rank 2 there. "1@4:stuck": rank 1 ends itself.
SCRIPT = """
import json, os, signal, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import allhands

batch, pause, losses = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
data = TensorDataset(x, y)
loop = allhands.Loop(
    model=model, optimizer=optimizer, scheduler=(scheduler, "step"), logdir="logs",
    loaders={
        "train": DataLoader(data, batch_size=batch, shuffle=True),
        "valid": DataLoader(data, batch_size=batch),
    },
)

def loss_of(batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(loop.model(inputs), targets), "size": inputs.abs().mean()}

def maybe(place):
    for word in losses:
        who, _, kind = word.partition(":")
        restarted = os.environ.get("ALLHANDS_ELASTIC_JOINS")
        if who != f"{os.environ.get('RANK')}@{place}" or restarted:
            continue
        if "SIG" in kind:
            os.kill(os.getpid(), getattr(signal, kind))
        elif kind == "stuck":
            from allhands.loop import joining

            joining._drop_out("an operation did not end")

if any(word.endswith((":behind", ":dies")) for word in losses):
    from allhands.loop.shared_measures import SharedMeasures

    share = SharedMeasures.share

    def behind(self):
        share(self)
        if f"{os.environ.get('RANK')}@{loop.global_step}:dies" in losses:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{os.environ.get('RANK')}@{loop.global_step}:behind" in losses:
            losses.clear()
            raise RuntimeError("the connection is closed")

    SharedMeasures.share = behind

for epoch in loop.epochs(3):
    for batch in epoch.train:
        maybe(loop.global_step)
        loop.step(loss_of, batch)
        time.sleep(pause)
    maybe(f"e{epoch.number}")
    epoch.evaluate("valid", loss_of)
if loop.main:
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    with open("final.json", "w") as file:
        json.dump([weights, loop.history, loop.global_step, loop.world.world_size], file)
"""


def until_one_joins(script: str) -> str:
    """Steps that last until a worker has joined, and no longer."""
    waits = """\
        if os.environ.get("ALLHANDS_ELASTIC_JOINS"):
            open("joined", "w").close()
        time.sleep(0 if os.path.exists("joined") else pause)
"""
    changed = script.replace("        time.sleep(pause)\n", waits)
    assert changed != script
    return changed


class Runner:
    """The same training by a `SupervisedRunner`, with a metric that keeps all outputs."""

    SCRIPT = """
import json, os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAUROC
import allhands
from allhands.world import current_world

losses = sys.argv[3:]
torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)

class Data(Dataset):
    def __len__(self):
        return 83
    def __getitem__(self, index):
        return x[index], y[index]

class Loses(allhands.Callback):
    steps = 0
    def maybe(self, place):
        for word in losses:
            who, _, kind = word.partition(":")
            if who == f"{os.environ.get('RANK')}@{place}":
                os.kill(os.getpid(), getattr(signal, kind))
    def on_step_end(self, training):
        self.steps += 1
        self.maybe(training.step)
    def on_evaluate_start(self, training):
        self.maybe(f"e{training.epoch + 1}")

loses = Loses()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
batch = int(sys.argv[1])
history = allhands.SupervisedRunner().train(
    model=model, criterion=torch.nn.CrossEntropyLoss(), num_epochs=3, callbacks=[loses],
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    metrics={"auc": MulticlassAUROC(3)},
    loaders={
        "train": DataLoader(Data(), batch_size=batch, shuffle=True),
        "valid": DataLoader(Data(), batch_size=batch),
    },
)
world = current_world()
if world is None or world.rank == 0:
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    with open("final.json", "w") as file:
        json.dump([weights, history, loses.steps, world.world_size if world else 1], file)
"""


def result(folder: Path) -> list[Any]:
    found: list[Any] = json.loads((folder / "final.json").read_text())
    return found


def alone(folder: Path, script: str, batch: int) -> list[Any]:
    """What one process comes to, undisturbed."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    words = [sys.executable, "script.py", str(batch), "0"]
    subprocess.run(words, cwd=folder, check=True, timeout=patience(120), capture_output=True)
    return result(folder)


def assert_same(mine: list[Any], theirs: list[Any], most: float = 1e-5) -> None:
    for own, other in zip(mine[0], theirs[0], strict=True):
        assert own == pytest.approx(other, rel=10 * most, abs=most)
    for loader in ("train", "valid"):
        assert mine[1][loader].keys() == theirs[1][loader].keys()
        for name, values in theirs[1][loader].items():
            assert mine[1][loader][name] == pytest.approx(values, rel=10 * most), (loader, name)
    assert mine[1]["step"] == theirs[1]["step"]
    assert mine[2] == theirs[2], "no step is lost or taken twice"


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


SHARDED = (
    SCRIPT.replace(
        'logdir="logs"', 'strategy=allhands.DDP(optimizer_state="sharded"), clip_norm=0.5'
    )
    .replace(
        """    SharedMeasures.share = behind
""",
        """    SharedMeasures.share = behind

    # "1@5:within": rank 1 is told of the loss after its own part of the update
    from allhands.strategies.ddp_exchange import DDPExchange

    bring = DDPExchange.updated

    def broken(self):
        if f"{os.environ.get('RANK')}@{loop.global_step}:within" in losses:
            losses.clear()
            raise RuntimeError("the connection is closed")
        bring(self)

    DDPExchange.updated = broken
""",
    )
    .replace('endswith((":behind", ":dies"))', 'endswith((":behind", ":within", ":dies"))')
)


LOSSES_OF_PARTS = pytest.mark.parametrize(
    "losses",
    [
        ["2@5:SIGKILL", "0@e2:SIGKILL"],
        ["1@4:SIGTERM"],
        # one has not begun the update that the other has made, and sent in vain
        ["2@5:dies", "0@5:behind", "1@5:within"],
        ["2@5:dies", "0@5:within", "1@5:within"],
    ],
    ids=" ".join,
)


def assert_no_part_is_lost(job: Job, text: str, losses: list[str]) -> None:
    """Three workers, of whom these are lost, train as one process does."""
    code, out, err = job.run("-n", "3", "--elastic", job.script(text), "4", "0", *losses)
    assert code == 0, out + err
    assert "each part of the optimizer's state is on two workers" in out
    found = result(job.folder)
    assert_same(found, alone(job.folder / "alone", text, 12))
    assert found[3] == 3 - sum("SIG" in word or "dies" in word for word in losses)


def assert_a_spare_gets_its_part(job: Job, joined: str, text: str) -> None:
    """Two workers, of whom one is lost and a spare takes its place, train as one process does."""
    words = ("-n", "2", "--spares", "1", "--elastic", job.script(joined), "6", "0.6")
    code, out, err = job.run(*words, "0@9:SIGKILL", timeout=150)
    assert code == 0, out + err
    assert "membership 2: 1 worker joined" in out
    found = result(job.folder)
    assert found[3] == 2
    assert_same(found, alone(job.folder / "alone", text, 12))


@LOSSES_OF_PARTS
def test_parts_of_the_optimizers_state_are_not_lost(job: Job, losses: list[str]) -> None:
    assert_no_part_is_lost(job, SHARDED, losses)


def test_a_worker_that_joins_gets_its_part_of_the_optimizers_state(job: Job) -> None:
    assert_a_spare_gets_its_part(job, until_one_joins(SHARDED), SHARDED)


def test_a_part_that_was_lost_twice_ends_the_training(job: Job) -> None:
    # of a world of 4, two neighbours; 1 and 3 would do
    script = job.script(SHARDED)
    code, out, err = job.run("-n", "4", "--elastic", script, "3", "0", "1@5:SIGKILL", "2@5:SIGKILL")
    assert code != 0
    assert "workers that keep the same part of the optimizer's state were lost at once" in out + err
    assert "--max-restarts" in out + err


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
