"""Several inputs and targets by key, batches that are objects, and targets without the output's
last dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Federated, SupervisedRunner, UserError

ROWS = [{"user": torch.rand(4), "item": torch.rand(4), "y": torch.rand(1)} for _ in range(22)]


class Pair(nn.Linear):
    """Its second argument counts twice, so that exchanged arguments show."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 1)

    def forward(self, user, item):
        return super().forward(user + 2 * item)


class Other(Pair):
    def forward(self, first, second):
        return super().forward(first, second)


def plain() -> torch.Tensor:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for start in range(0, 22, 8):
        part = ROWS[start : start + 8]
        user, item, y = (torch.stack([row[key] for row in part]) for key in ("user", "item", "y"))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(user, item), y).backward()
        optimizer.step()
    return model.weight.detach()


def train(
    model: nn.Module,
    runner: SupervisedRunner,
    rows: Any = ROWS,
    criterion: Any = None,
    **options: Any,
) -> Any:
    return runner.train(
        model=model,
        criterion=criterion or nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        loaders={"train": DataLoader(rows, 8 // options.get("workers", 1))},
        **options,
    )


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["user", "item"], Pair),
        (("item", "user"), Pair),  # by name
        (["user", "item"], Other),  # in their order
        ({"second": "item", "first": "user"}, Other),
    ],
)
def test_several_inputs(keys, kind):
    model = kind()
    runner = SupervisedRunner(input_key=keys, target_key="y", device="cpu")
    train(model, runner)
    torch.testing.assert_close(model.weight.detach(), plain(), rtol=0, atol=1e-6)
    rows = runner.predict(
        model=model, dataset=[{"user": r["user"], "item": r["item"]} for r in ROWS], batch_size=5
    )
    torch.testing.assert_close(rows[3], model(ROWS[3]["user"], ROWS[3]["item"]).detach())
    numbers = runner.evaluate(
        model=model, criterion=nn.MSELoss(), loaders={"valid": DataLoader(ROWS, 5)}
    )
    whole = torch.stack([r["y"] for r in ROWS])
    assert numbers["valid"]["loss"] == pytest.approx(
        float(nn.functional.mse_loss(rows, whole)), abs=1e-6
    )


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_several_inputs_on_two_workers_and_two_clients():
    for options in (
        {"distributed": "ddp", "workers": 2},
        {
            "distributed": Federated(
                clients=1, partition=[list(range(22))], rounds=1, local_steps=1
            ),
            "workers": 1,
        },
    ):
        model = Pair()
        train(
            model,
            SupervisedRunner(input_key=["user", "item"], target_key="y", device="cpu"),
            **options,
        )
        if options["distributed"] == "ddp":
            torch.testing.assert_close(model.weight.detach(), plain(), rtol=0, atol=1e-6)
        assert not torch.equal(model.weight, Pair().weight)


def test_several_targets_are_a_dict():
    def criterion(output, target):
        return nn.functional.mse_loss(output, target["y"] + target["user"].mean(1, keepdim=True))

    seen = []
    history = SupervisedRunner(
        input_key={"user": "user", "item": "item"}, target_key=["y", "user"], device="cpu"
    ).train(
        model=(model := Pair()),
        criterion=criterion,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loaders={"train": DataLoader(ROWS, 8)},
        metrics={"n": lambda output, target: seen.append(sorted(target)) or 1.0},
    )
    assert seen == [["user", "y"]] * 3
    assert history["train"]["n"] == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_key": 3}, "input_key=3; it must be a key of the batches"),
        ({"input_key": []}, r"input_key=\[\]; it must be"),
        ({"input_key": ["a", 1]}, "it must be a key"),
        ({"input_key": {"x": 1}}, "a dict of an argument of the model to a key"),
        ({"target_key": None}, "target_key=None; it must be"),
        ({"target_key": ["a", "a"]}, "names a key twice"),
    ],
)
def test_keys_are_checked_when_the_runner_is_made(options, message):
    with pytest.raises(UserError, match=message):
        SupervisedRunner(**options)


def test_a_key_that_batches_do_not_have():
    with pytest.raises(
        UserError,
        match=r"keys 'user', 'item', 'y' and no 'users'; did you mean 'user'\? write .*input_key",
    ):
        train(Pair(), SupervisedRunner(input_key=["users", "item"], target_key="y"))
    with pytest.raises(UserError, match=r"no 'label'.*target_key"):
        train(
            Pair(),
            SupervisedRunner(input_key=["user", "item"], target_key="label"),
            criterion=nn.CrossEntropyLoss(),
        )


class Batch:
    def __init__(self, rows):
        self.x, self.y = (
            torch.stack([row[0] for row in rows]),
            torch.stack([row[1] for row in rows]),
        )


class Objects(SupervisedRunner):
    def handle_batch(self, model, batch):
        return model(batch.x), batch.y


def of_objects(runner: SupervisedRunner) -> nn.Module:
    torch.manual_seed(0)
    model, data = (
        nn.Linear(4, 2),
        TensorDataset(torch.eye(4).repeat(4, 1), torch.tensor([0, 1] * 8)),
    )
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        datasets={"batch_size": 4, "collate_fn": Batch, "train": data},
    )
    return model


def test_batches_that_are_objects():
    with pytest.raises(
        UserError,
        match=r"has the keys 'x', 'y' and no 'targets'; write SupervisedRunner\(target_key=",
    ):
        of_objects(Objects())
    told = type("Told", (Objects,), {"target_of": lambda self, batch: batch.y})()
    tuples = type("Tuples", (SupervisedRunner,), {})()
    data = TensorDataset(torch.eye(4).repeat(4, 1), torch.tensor([0, 1] * 8))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    tuples.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        datasets={"batch_size": 4, "train": data},
    )
    torch.testing.assert_close(of_objects(told).weight, model.weight, rtol=0, atol=1e-6)


@dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    "make", [lambda loss, logits: {"loss": loss, "logits": logits}, Out, lambda *both: list(both)]
)
def test_metrics_beside_an_output_whose_first_member_is_a_number(make):
    class Own(SupervisedRunner):
        def handle_batch(self, model, batch):
            logits = model(batch[0])
            return make(nn.functional.cross_entropy(logits, batch[1]), logits), batch[1]

    def logits(output):
        return (
            output[1]
            if isinstance(output, list)
            else output["logits"]
            if isinstance(output, dict)
            else output.logits
        )

    torch.manual_seed(0)
    model, data = nn.Linear(4, 2), TensorDataset(torch.randn(13, 4), torch.randint(0, 2, (13,)))
    before = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    given = {
        "model": model,
        "criterion": lambda o, t: nn.functional.cross_entropy(logits(o), t),
        "datasets": {"batch_size": 4, "v": data},
    }
    own = Own().evaluate(
        **given, metrics={"right": lambda o, t: (logits(o).argmax(1) == t).float().mean()}
    )
    assert own["v"]["right"] == pytest.approx(float(before), abs=1e-6)
    with pytest.raises(
        UserError,
        match=r"metric 'acc', a MulticlassAccuracy, cannot take .* metrics=\{'acc': lambda",
    ):
        Own().evaluate(**given, metrics={"acc": torchmetrics.classification.MulticlassAccuracy(2)})


@pytest.mark.parametrize("flat", ["target", "output"])
def test_a_target_without_the_outputs_last_dimension_is_read_in_its_shape(flat, capsys):
    x, y = torch.rand(20, 10), torch.rand(20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 1), *([nn.Flatten(0)] if flat == "output" else []))
    reference = nn.Linear(10, 1)
    reference.load_state_dict(
        {key.removeprefix("0."): value for key, value in model.state_dict().items()}
    )
    loader = DataLoader(TensorDataset(x, y if flat == "target" else y[:, None]), 7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        loaders={"train": loader, "valid": loader},
        metrics={"mae": torchmetrics.MeanAbsoluteError()},
        num_epochs=2,
    )
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(2):
        for some, right in zip(x.split(7), y.split(7), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(reference(some).squeeze(1), right).backward()
            optimizer.step()
    torch.testing.assert_close(model[0].weight, reference.weight, rtol=0, atol=1e-6)
    mae = float((reference(x).detach().squeeze(1) - y).abs().mean())
    assert history["valid"]["mae"][-1] == pytest.approx(mae, abs=1e-6)
    assert capsys.readouterr().out.count("is read in the output's shape") == 1


def test_other_shapes_that_differ_stay_refused():
    model = nn.Linear(10, 2)
    with pytest.raises(UserError, match=r"shape \[7, 2\] and the target \[7\]"):
        SupervisedRunner().train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            datasets={"batch_size": 7, "train": TensorDataset(torch.rand(20, 10), torch.rand(20))},
        )


@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_clients_read_such_targets_too(executor, capsys):
    x, y = torch.rand(12, 10), torch.rand(12)
    weights = []
    for target in (y, y[:, None]):
        torch.manual_seed(0)
        model = nn.Linear(10, 1)
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            datasets={
                "batch_size": 4,
                "train": TensorDataset(x, target),
                "valid": TensorDataset(x, target),
            },
            distributed=Federated(clients=3, partition="iid", rounds=2, executor=executor),
            workers=1,
        )
        weights.append(model.weight.detach())
    assert torch.equal(*weights)
    assert "is read in the output's shape" in capsys.readouterr().out
