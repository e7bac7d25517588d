"""`SupervisedRunner.train(distributed=Federated(…))`: each argument is honoured or refused by
name."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import allhands
from allhands import Callback, SupervisedRunner
from allhands.errors import UserError
from allhands.federated import Federated
from allhands.loop import workers
from allhands.runner import EarlyStopping
from tests.federated import simulating as sim


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr(workers, "world_around", lambda: 1)
    yield
    allhands.finalize()


def train(net: nn.Module | None = None, strategy: Federated | None = None, optimizer=None, **given):
    net = net if net is not None else sim.model()
    samples = TensorDataset(*sim.data())
    options = {
        "model": net,
        "criterion": nn.MSELoss(),
        "optimizer": optimizer or torch.optim.SGD(net.parameters(), lr=0.1),
        "datasets": {"batch_size": 8, "train": samples, "valid": samples},
        "distributed": strategy or Federated(clients=5, per_round=3, rounds=4, executor="serial"),
    }
    return SupervisedRunner(device="cpu").train(**{**options, **given}), net


class Seen(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_train_start(self, training):
        self.calls.append(("start", training.epoch))

    def on_epoch_start(self, training):
        self.calls.append(("before", training.epoch))

    def on_epoch_end(self, training):
        weights = training.rounds.server.layout.read(training.model)
        assert torch.equal(weights, training.rounds.server.weights)
        assert training.history["valid"]["loss"]
        self.calls.append(("after", training.epoch))

    def on_train_end(self, training):
        self.calls.append(("end", training.epoch))


def test_the_model_is_trained_in_place_and_the_history_has_what_was_measured():
    history, net = train()
    assert history["round"] == [0, 1, 2, 3]
    assert history["lr"] == [0.1] * 4
    assert len(history["valid"]["loss"]) == 4
    assert history["valid"]["loss"][-1] < history["valid"]["loss"][0]
    x, y = sim.data()
    assert history["valid"]["loss"][-1] == pytest.approx(nn.functional.mse_loss(net(x), y).item())


def test_bf16_reaches_the_clients_and_the_measuring_and_weights_stay_as_they_are():
    x, y = (part.float() for part in sim.data())
    ends = {}
    for precision in ("fp32", "bf16"):
        net = sim.model(dtype=torch.float32)
        history, _ = train(
            net,
            Federated(clients=5, per_round=3, rounds=4, executor="serial", test_fraction=0.2),
            precision=precision,
            datasets={"batch_size": 8, "train": TensorDataset(x, y), "valid": TensorDataset(x, y)},
        )
        assert all(p.dtype == torch.float32 for p in net.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            assert history["valid"]["loss"][-1] == pytest.approx(
                nn.functional.mse_loss(net(x), y).item(), rel=1e-5
            )
        ends[precision] = history["valid"]["loss"][-1], history["clients"]["loss"][-1]
    assert ends["bf16"] == pytest.approx(ends["fp32"], rel=0.02)
    assert ends["bf16"][0] != ends["fp32"][0]
    assert ends["bf16"][1] != ends["fp32"][1]


def test_a_schedule_steps_once_a_round_on_the_clients_learning_rate():
    plain, net = sim.model(), sim.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.0)
    history, _ = train(net, optimizer=optimizer, scheduler=schedule)
    assert history["lr"] == [0.1, 0.0, 0.0, 0.0]
    train(plain, Federated(clients=5, per_round=3, rounds=1, executor="serial"))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_a_schedule_of_momentum_reaches_the_clients():
    net, seen = sim.model(), []

    class Look(Callback):
        def on_epoch_end(self, training):
            seen.append(training.rounds.work.local.optimizer.options[0]["momentum"])
            seen.append(training.rounds.executor.chosen.optimizer.param_groups[0]["momentum"])

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=4)
    train(
        net,
        Federated(clients=5, per_round=3, rounds=4),
        optimizer=optimizer,
        scheduler=schedule,
        callbacks=[Look()],
    )
    assert seen[0] == seen[1] == 0.95
    assert seen[2] == seen[3] < 0.95


def test_a_plateau_is_looked_for_in_rounds_that_are_evaluated():
    net = sim.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=1e9, threshold_mode="abs"
    )
    strategy = Federated(clients=5, per_round=3, rounds=6, evaluate_every=2, executor="serial")
    history, _ = train(net, strategy, optimizer=optimizer, scheduler=schedule)
    assert history["lr"] == pytest.approx([0.1] * 4 + [0.01] * 2)


def test_callbacks_take_rounds_for_epochs():
    seen = Seen()
    train(
        strategy=Federated(clients=5, rounds=3, evaluate_every=2, executor="serial"),
        callbacks=[seen],
    )
    assert seen.calls == [
        ("start", 0),
        ("before", 0),
        ("before", 1),
        ("after", 2),
        ("before", 2),
        ("after", 3),
        ("end", 3),
    ]


def test_early_stopping_counts_evaluations(capsys):
    history, _ = train(callbacks=[EarlyStopping(patience=1, min_delta=1e9)])
    assert history["round"] == [0, 1]
    assert "stopped after round 2" in capsys.readouterr().out


@pytest.mark.parametrize("with_logdir", [True, False])
def test_the_best_round_is_loaded(tmp_path, with_logdir):
    net = sim.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda rounds: 1.0 if rounds < 2 else -30.0
    )
    history, _ = train(
        net,
        optimizer=optimizer,
        scheduler=schedule,
        load_best_on_end=True,
        logdir=tmp_path if with_logdir else None,
    )
    x, y = sim.data()
    found = nn.functional.mse_loss(net(x), y).item()
    assert found == pytest.approx(min(history["valid"]["loss"]))
    assert found < history["valid"]["loss"][-1]


def test_metrics_are_written_a_row_a_round(tmp_path):
    history, _ = train(
        strategy=Federated(clients=5, rounds=3, evaluate_every=2, executor="serial"),
        logdir=tmp_path,
    )
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [float(row["train_loss"]) for row in rows] == history["train"]["loss"]
    assert [row["valid_loss"] for row in rows] == ["", *map(str, history["valid"]["loss"])]
    assert list((tmp_path / "tensorboard").iterdir())


def test_check_is_three_rounds_of_three_steps():
    seen = []

    class Look(Callback):
        def on_epoch_end(self, training):
            seen.append(training.rounds.work.local.num_steps(100))

    history, _ = train(
        strategy=Federated(clients=2, rounds=50, local_epochs=40, executor="serial"),
        check=True,
        callbacks=[Look()],
    )
    assert len(history["round"]) == 3
    assert seen == [3] * 3


class Steps(Callback):
    def on_step_end(self, training):
        pass


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_epochs": 3}, r"num_epochs=3 .*Federated\(rounds=3\)"),
        ({"accumulate": 2}, "accumulate=2 .*batches 2 times larger"),
        ({"precision": "fp16"}, "precision='fp16' .*precision='bf16'"),
        ({"overfit": True}, "overfit=True .*local_steps=1"),
        ({"log_every": 10}, "log_every=10 .*leave it out"),
        ({"callbacks": [Steps()]}, "Steps.on_step_end"),
        (
            {"valid_loader": "test"},
            "valid_loader='test' is not among the loaders; given are: valid, train",
        ),
        (
            {"valid_loader": "train", "main_metric": "accuracy", "metrics": ["accuracy"]},
            "write main_metric='loss'",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(given, match):
    with pytest.raises(UserError, match=match):
        train(**given)


@pytest.mark.parametrize(
    ("method", "given", "match"),
    [("log", ("norm", 1.0), "history.setdefault"), ("save_checkpoint", (), "save_every=1")],
)
def test_callbacks_are_told_what_rounds_do_not_have(method, given, match):
    class Asks(Callback):
        def on_epoch_end(self, training):
            getattr(training, method)(*given)

    with pytest.raises(UserError, match=match):
        train(callbacks=[Asks()])


def test_a_callback_may_add_to_the_history():
    class Adds(Callback):
        def on_epoch_end(self, training):
            training.history.setdefault("norm", []).append(training.epoch)

    assert train(callbacks=[Adds()])[0]["norm"] == [1, 2, 3, 4]


def test_a_period_of_steps_is_refused():
    net = sim.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserError, match="once a round"):
        train(net, optimizer=optimizer, scheduler=(schedule, "step"))


@pytest.mark.parametrize("options", [{"on_client_failure": "ignore"}, {"client_retries": 0}])
def test_options_of_failures_are_checked_when_they_are_written(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Federated(clients=3, **options)


def tenfold(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return 10 * x, y


class Slope(nn.Module):
    """After one step of SGD(lr=1) from 0, -w is the gradient of the mean of w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class Ones(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), torch.zeros(1)


def slope(data: Any, executor: Any = "auto", collate_fn: Any = tenfold, **options: Any) -> float:
    model = Slope()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=lambda output, _: output.mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loaders={"train": DataLoader(data, batch_size=4, collate_fn=collate_fn, **options)},
        metrics={"m": lambda o, t: 0.0},
        distributed=Federated(
            clients=2, partition=[[0, 1, 2, 3], [4, 5, 6, 7]], rounds=1, executor=executor
        ),
    )
    return -model.w.item()


@pytest.mark.parametrize("executor", ["auto", "serial"])
@pytest.mark.parametrize(
    "data", [Ones(), TensorDataset(torch.ones(8, 1), torch.zeros(8, 1))], ids=["read", "tensors"]
)
def test_clients_batches_are_made_by_the_loaders_collate_function(data, executor):
    assert slope(data, executor) == pytest.approx(10.0)
    assert slope(data, executor, collate_fn=None) == pytest.approx(1.0)


@pytest.mark.parametrize("executor", ["stacked", "graph"])
def test_executors_that_cannot_call_a_collate_function_say_so(executor):
    with pytest.raises(UserError, match=f"executor='{executor}' cannot train these clients"):
        slope(Ones(), executor)


def test_what_loader_processes_would_do_is_said_or_refused(capsys):
    assert slope(Ones(), num_workers=2) == pytest.approx(10.0)
    printed = capsys.readouterr().out
    assert (
        "note: loader 'train' has num_workers=2; clients' samples are read in the workers that "
        "train" in printed
    )
    assert "note: metrics (m) are of loaders that are evaluated, and there is none" in printed
    with pytest.raises(
        UserError, match="has a worker_init_fn, which loader processes call, and clients have none"
    ):
        slope(Ones(), num_workers=1, worker_init_fn=print)
