"""Federated trainings that go on in their processes when a worker is lost: the same weights and
history as one process that nothing disturbed."""

from __future__ import annotations

import pytest

from .conftest import Job
from .elastic_jobs import alone, result

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

# How each worker is to be lost: "2@3t", the rank under which it was started, the round, and whether
# in a client's training, in the evaluation, or after the sum of the round ("d"). "0@2b": rank 0 is
# told of a loss then, and the others once they have ended the round.
SCRIPT = """
import json, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import allhands
from allhands import Federated
from allhands.federated.sums import Sums
from allhands.world import current_world

losses, now = sys.argv[3:], {"round": 0}
here = f"{os.environ.get('RANK')}@"
restarted = os.environ.get("ALLHANDS_ELASTIC_JOINS")

def maybe(kind):
    if f"{here}{now['round']}{kind}" in losses and not restarted:
        os.kill(os.getpid(), signal.SIGKILL)

class Model(torch.nn.Sequential):
    def forward(self, x):
        maybe("t" if self.training else "e")
        return super().forward(x)

exchange = Sums.exchange

def told_of_a_loss(self, world):
    exchange(self, world)
    maybe("d")
    if f"{here}{now['round']}b" in losses:
        losses.clear()
        raise RuntimeError("the connection is closed")

Sums.exchange = told_of_a_loss

class Rounds(allhands.Callback):
    def on_epoch_start(self, training):
        now["round"] = training.step
        maybe("s")
        if restarted:
            open("joined", "w").close()
        time.sleep(0 if os.path.exists("joined") else float(sys.argv[2]))

torch.manual_seed(0)
x = torch.randn(83, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
norm = torch.nn.GroupNorm(2, 8)
model = Model(torch.nn.Linear(6, 8), norm, torch.nn.Tanh(), torch.nn.Linear(8, 3))
history = allhands.SupervisedRunner().train(
    model=model, criterion=torch.nn.CrossEntropyLoss(), callbacks=[Rounds()], logdir="logs",
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    loaders={
        "train": DataLoader(TensorDataset(x, y), batch_size=8),
        "valid": DataLoader(TensorDataset(x, y), batch_size=16),
    },
    distributed=Federated(
        clients=7, per_round=5, rounds=6, local_epochs=2, evaluate_every=2, algorithm=ALGORITHM,
        partition={"name": "dirichlet", "alpha": 1.0},
    ),
)
world = current_world()
if world is None or world.rank == 0:
    weights = [v.detach().double().flatten().tolist() for v in model.state_dict().values()]
    with open("final.json", "w") as file:
        json.dump([weights, history, world.world_size if world else 1], file)
"""


def assert_same_rounds(job: Job, script: str, workers: int) -> None:
    print((job.folder / "logs" / "membership.csv").read_text())
    weights, history, left = result(job.folder)
    others, expected, _ = alone(job.folder / "alone", script, 0)
    assert left == workers
    # Sums of clients are exact, whoever has trained them.
    for own, other in zip(weights, others, strict=True):
        assert own == pytest.approx(other, rel=1e-6, abs=1e-7)
    assert history["round"] == list(range(6))
    assert history["cohort"] == expected["cohort"]
    assert history["valid"]["round"] == expected["valid"]["round"]
    for loader in ("train", "valid"):
        assert history[loader]["loss"] == pytest.approx(expected[loader]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "losses", "left"),
    [
        ("fedavg", ["2@1t"], 2),
        ("fedavg", ["0@3e", "1@5t"], 1),
        # rank 0 has not ended the round that rank 1 has; below it is the other way round
        ("fedadam", ["2@2d", "0@2b"], 2),
        # rare: the mirror image of the row above
        pytest.param("fedadam", ["2@2d", "1@2b"], 2, marks=pytest.mark.rare),
    ],
)
def test_a_round_is_repeated(job: Job, algorithm: str, losses: list[str], left: int) -> None:
    text = SCRIPT.replace("ALGORITHM", repr(algorithm))
    code, out, err = job.run("-n", "3", "--elastic", job.script(text), "0", "0", *losses)
    assert code == 0, out + err
    assert "repeat what was interrupted after round" in out
    assert_same_rounds(job, text, left)


def test_a_worker_joins_between_two_rounds(job: Job) -> None:
    text = SCRIPT.replace("ALGORITHM", "'fedadam'")
    words = ("-n", "2", "--spares", "1", "--elastic", job.script(text), "0", "1.5", "0@1t")
    code, out, err = job.run(*words, timeout=150)
    assert code == 0, out + err
    assert "membership 2: 1 worker joined; 2 workers go on after round" in out
    assert_same_rounds(job, text, 2)


def test_what_clients_keep_on_a_worker_is_named(job: Job) -> None:
    text = SCRIPT.replace("ALGORITHM", "'scaffold'")
    code, out, err = job.run("-n", "2", "--elastic", job.script(text), "0", "0", "1@2s")
    assert code != 0
    assert "a lost worker ends this training in spite of --elastic: clients keep 'control'" in out
    assert "cannot go on without starting again: clients keep" in out + err


COALA = """
import torch
import allhands.federated as coala

torch.manual_seed(0)
x = torch.randn(40, 1, 4, 4)
y = x.flatten(1).argmax(1) % 3
coala.register_dataset((x, y), (x, y))
coala.register_model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)))
coala.init({
    "gpu": GPU, "data": {"num_of_clients": 4},
    "server": {"rounds": 1, "clients_per_round": 2}, "client": {"local_epoch": 1},
})
coala.run()
"""


def test_coala_says_at_its_start_that_it_cannot_go_on(job: Job) -> None:
    script = job.script(COALA.replace("GPU", "2"))
    code, out, err = job.run("-n", "2", "--elastic", script)
    assert code == 0, out + err
    said = "a lost worker ends this training in spite of --elastic: COALA's server and clients"
    assert out.count(said) == 1
    code, out, err = job.run("-n", "2", script)
    assert code == 0, out + err
    assert "--elastic" not in out
