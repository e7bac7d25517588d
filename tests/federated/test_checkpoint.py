"""Going on from a checkpoint: to the bit, on any number of ranks, and never from a damaged one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import Callback, SupervisedRunner, load_checkpoint
from allhands.cli import main
from allhands.errors import UserError
from allhands.federated import Federated
from allhands.loop import workers
from tests.federated import simulating as sim


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr(workers, "world_around", lambda: 1)
    yield
    allhands.finalize()


class Stop(Callback):
    """Ends the training after some rounds."""

    def __init__(self, after: int | None = None) -> None:
        self.after = after

    def on_epoch_end(self, training):
        if training.epoch == self.after:
            training.stop("for the test")


class Term(Stop):
    def on_epoch_end(self, training):
        if training.epoch == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    logdir: Path | None,
    stop: Stop,
    resume: str | None = None,
    algorithm="scaffold",
    seed: int = 42,
    **options,
):
    net = sim.model()
    samples = TensorDataset(*sim.data())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {
        "clients": 6,
        "per_round": 3,
        "rounds": 6,
        "executor": "serial",
        "local_epochs": 2,
        "algorithm": algorithm,
        **options,
    }
    saves = {key: given.pop(key) for key in ("save_every",) if key in given}
    history = SupervisedRunner(device="cpu").train(
        model=net,
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        seed=seed,
        logdir=logdir,
        resume=resume,
        callbacks=[stop],
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        datasets={"batch_size": 4, "train": samples, "valid": samples},
        distributed=Federated(**given),
        **saves,
    )
    return history, torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def told(history):
    return {key: value for key, value in history.items() if key != "seconds"}


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "fedavg"},
        {"algorithm": "scaffold"},
        {"algorithm": {"name": "fedadam"}},
        {"algorithm": "fedavg", "local_layers": ["2"]},
        {
            "algorithm": "fedavg",
            "compress": {"name": "topk", "keep": 0.2, "feedback": True},
            "systems": {
                "speed": {"name": "lognormal", "median": 4.0, "sigma": 1.0},
                "over_selection": 0.3,
            },
        },
        {
            "algorithm": {"name": "fedbuff", "concurrency": 4},
            "systems": {"speed": {"name": "lognormal", "median": 4.0, "sigma": 1.0}},
        },
        {
            "algorithm": {"name": "fedavg", "weighted": False},
            "privacy": {"clip": 0.1, "noise_multiplier": 0.1},
        },
    ],
)
def test_interrupted_and_resumed_is_uninterrupted_to_the_bit(tmp_path, options):
    history, weights = train(None, Stop(), **options)
    train(tmp_path, Stop(3), **options)
    again, found = train(tmp_path, Stop(), "auto", **options)
    assert told(again) == told(history)
    assert torch.equal(found, weights)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) == 7


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    _, weights = train(None, Stop())
    train(tmp_path, Stop(4))
    damaged = next((tmp_path / "checkpoints" / "epoch-0004").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    _, found = train(tmp_path, Stop(), "auto")
    said = capsys.readouterr().out
    assert f"{damaged} does not match its checksum" in said
    assert "resuming from" in said
    assert "epoch-0003" in said
    assert torch.equal(found, weights)
    with pytest.raises(UserError, match="cut short or changed"):
        damaged = next((tmp_path / "checkpoints" / "epoch-0006").glob("*.distcp"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0\0")
        train(None, Stop(), str(damaged.parent))


def test_sigterm_saves_and_leaves_with_143(tmp_path):
    _, weights = train(None, Stop())
    with pytest.raises(SystemExit) as left:
        train(tmp_path, Term(2), save_every=100)
    assert left.value.code == 143
    assert (tmp_path / "checkpoints" / "last").resolve().name in ("epoch-0002", "epoch-0003")
    _, found = train(tmp_path, Stop(), "auto")
    assert torch.equal(found, weights)


def test_save_every_counts_rounds(tmp_path, monkeypatch):
    from allhands.federated.checkpoint import RoundCheckpoints

    saved = []
    whole = RoundCheckpoints.save
    monkeypatch.setattr(
        RoundCheckpoints,
        "save",
        lambda self, *given: (saved.append(self.loop.epoch), whole(self, *given))[1],
    )
    monkeypatch.setattr(
        "allhands.federated.round_loop.RoundLoop._update_best", lambda self, values: False
    )
    train(tmp_path, Stop(), save_every=4)
    assert saved == [4, 6]
    saved.clear()
    train(tmp_path, Stop(), evaluate_every=5)
    assert saved == [5, 6]


def test_the_weights_can_be_taken_elsewhere(tmp_path):
    _, weights = train(tmp_path, Stop())
    state = load_checkpoint(tmp_path / "checkpoints" / "last")["model"]
    assert torch.equal(
        torch.cat([state[name].reshape(-1) for name, _ in sim.model().named_parameters()]), weights
    )
    safetensors = pytest.importorskip("safetensors.torch")
    assert (
        main.run(
            [
                "export",
                str(tmp_path / "checkpoints" / "last"),
                "-o",
                str(tmp_path / "w.safetensors"),
            ]
        )
        == 0
    )
    assert torch.equal(
        safetensors.load_file(tmp_path / "w.safetensors")["0.weight"], state["0.weight"]
    )


def test_more_rounds_go_on_from_the_end_of_fewer(tmp_path):
    _, weights = train(None, Stop())
    train(tmp_path, Stop(), rounds=4)
    _, found = train(tmp_path, Stop(), str(tmp_path))
    assert torch.equal(found, weights)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"seed": 1}, "seed 42 and this run has 1; set the seed to 42"),
        ({"clients": 5}, "clients 6 and this run has 5"),
        ({"algorithm": "fedavg"}, "algorithm 'scaffold' and this run has 'fedavg'"),
        ({"local_layers": ["2"]}, "clients of the checkpoint keep"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, other, match):
    train(tmp_path, Stop(2))
    with pytest.raises(UserError, match=match):
        train(tmp_path, Stop(), "auto", **other)


def test_a_training_that_was_not_federated_is_refused_and_the_other_way_round(tmp_path):
    def plain(resume):
        net = sim.model()
        samples = TensorDataset(*sim.data())
        SupervisedRunner(device="cpu").train(
            model=net,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            logdir=tmp_path / "plain",
            datasets={"batch_size": 4, "train": samples},
            resume=resume,
        )

    plain(None)
    with pytest.raises(UserError, match="not federated"):
        train(tmp_path, Stop(), str(tmp_path / "plain"))
    train(tmp_path / "rounds", Stop(1))
    with pytest.raises(UserError, match=r"distributed=Federated\(…\)"):
        plain(str(tmp_path / "rounds"))
