"""Metrics and criteria of outputs that are dicts, dataclasses and lists of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import allhands
from allhands import ModelLoss, OverBatch, SupervisedRunner, UserError
from allhands.runner.metrics import named_metrics
from tests.worlds import in_world


@dataclass
class Fields:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Net(nn.Module):
    """Gives its output as `kind` says."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        torch.default_generator.manual_seed(1)
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        made = self.layers(x)
        loss = None if labels is None else nn.functional.cross_entropy(made, labels)
        if self.kind == "tensor":
            return made
        return {"logits": made, "loss": loss} if self.kind == "dict" else Fields(made, loss)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(53, 5, generator=generator)
    return TensorDataset(x.double(), (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long())


class LabelsToo(SupervisedRunner):
    """Gives the model the labels, as models of transformers want them."""

    def handle_batch(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch), batch[1]


#: By name: the form of the output, the runner, and the criterion; all train the same.
CASES: dict[str, tuple[str, Any, Any]] = {
    "tensor": ("tensor", SupervisedRunner, nn.CrossEntropyLoss),
    "dict": ("dict", SupervisedRunner, nn.CrossEntropyLoss),
    "dataclass": ("dataclass", SupervisedRunner, nn.CrossEntropyLoss),
    "own loss, dict": ("dict", LabelsToo, ModelLoss),
    "own loss, dataclass": ("dataclass", LabelsToo, ModelLoss),
    "whole batch": ("dataclass", SupervisedRunner, lambda: OverBatch(nn.functional.cross_entropy)),
}


def train(name: str, batch_size: int, distributed: Any = False, epochs: int | None = 2) -> Any:
    """The weights and what was measured."""
    kind, runner, criterion = CASES[name]
    model = Net(kind).double()
    key = None if kind == "tensor" else "logits"
    history = runner(device="cpu", output_key=key).train(
        model=model,
        criterion=criterion(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        datasets={"batch_size": batch_size, "train": data(), "valid": data()},
        metrics={"named": "accuracy", "module": MulticlassAccuracy(4, average="micro")},
        num_epochs=epochs,
        distributed=distributed,
    )
    return dict(model.state_dict()), history


def check_alike(found: Any, expected: Any) -> None:
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-9, atol=1e-9)
    for loader in ("train", "valid"):
        assert found[1][loader].keys() == {"loss", "named", "module"}
        for key, values in expected[1][loader].items():
            assert found[1][loader][key] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name != "tensor"])
def test_a_part_of_the_output_is_trained_and_measured(name: str) -> None:
    check_alike(train(name, 12), train("tensor", 12))


def train_all(strategy: Any, refused: tuple[str, ...] = ()) -> list[Any]:
    return [train(name, 4, strategy) for name in CASES if name not in refused]


@pytest.mark.serial
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "kvstore"])
def test_on_three_workers(strategy: str) -> None:
    expected = train("tensor", 12)
    for one in in_world(3, train_all, strategy, preload=("torchmetrics",))[0]:
        check_alike(one, expected)


@pytest.mark.serial
def test_in_slices() -> None:
    strategy = allhands.Tensor(plan={"layers.0": "colwise", "layers.2": "rowwise"})
    for one in in_world(2, train_all, strategy, ("whole batch",), preload=("torchmetrics",))[0]:
        check_alike(one, train("tensor", 4))


def test_clients_of_federated_training() -> None:
    def federated(name: str) -> Any:
        strategy = allhands.Federated(clients=3, per_round=3, rounds=2, local_epochs=1)
        return train(name, 8, strategy, epochs=None)

    expected, found = federated("tensor"), federated("dataclass")
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-9, atol=1e-9)
    assert found[1]["valid"] == expected[1]["valid"]


# ------------------------------------------------------------------ lists of samples


class Listed(nn.Module):
    """In training a loss; in evaluation a dict for each sample, as models of detection give."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, values: Any) -> Any:
        if self.training:
            return {"loss": (self.w - torch.stack(list(values)).mean()).square()}
        return [{"found": torch.arange(int(value))} for value in values]


class Items(torchmetrics.Metric):
    """Keeps a list with a tensor for each sample, as mean average precision does."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)
        self.add_state("wanted", default=[], dist_reduce_fx=None)
        self.add_state("calls", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, output: Any, target: Any) -> None:
        self.calls += len(output)
        self.found += [sample["found"] for sample in output]
        self.wanted += [sample["wanted"] for sample in target]

    def compute(self) -> Any:
        same = [len(a) == len(b) for a, b in zip(self.found, self.wanted, strict=True)]
        return {
            "samples": len(self.found),
            "calls": self.calls,
            "items": torch.tensor(sum(len(items) for items in self.found)),
            "right": torch.tensor(sum(same) / len(same)),
            "in_order": torch.tensor(
                [len(items) for items in self.found] == list(range(len(self.found)))
            ),
            "by_class": torch.zeros(3),
        }


def lists(batch: list[Any]) -> Any:
    values = [value for (value,) in batch]
    return values, [{"wanted": torch.zeros(int(min(value, 3)))} for value in values]


def mean_found(output: Any, target: Any) -> float:
    return sum(len(sample["found"]) for sample in output) / len(output)


def detect(samples: int, **changes: Any) -> Any:
    """Training on numbers; one that is evaluated has as many boxes as it says, of which at most
    three are wanted."""
    values = TensorDataset(torch.arange(float(samples)))
    model = Listed()
    given = {
        "model": model,
        "criterion": ModelLoss(over="samples"),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "loaders": {
            "train": DataLoader(values, 2, collate_fn=lists),
            "valid": DataLoader(values, 2, collate_fn=lists),
        },
        "metrics": {"valid": {"items": Items(), "mean": mean_found}},
        "main_metric": "items_right",
        "minimize_metric": False,
        "num_epochs": 2,
        "distributed": torch.distributed.is_initialized(),
    }
    return SupervisedRunner(device="cpu").train(**given | changes)


def all_sizes() -> None:
    """With one sample, and with seven, a rank of three has none in the last step or in all."""
    for samples in (1, 5, 7):
        history = detect(samples)
        assert history["train"].keys() == {"loss"}
        mean, right = (samples - 1) / 2, min(samples, 4) / samples
        measured = {
            "items_samples": samples,
            "items_calls": samples,
            "items_items": samples * mean,
            "items_right": right,
            "items_in_order": 1,
            "mean": mean,
        }
        for key, values in history["valid"].items():
            assert values == pytest.approx([measured[key]] * 2), key
        assert history["valid"].keys() == measured.keys()


def test_lists_of_samples_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    all_sizes()
    said = capsys.readouterr().out
    assert said.count("metric 'items' computes by_class, too, which is no number") == 3


@pytest.mark.serial
def test_lists_of_samples_of_three_workers() -> None:
    in_world(3, all_sizes, preload=("torchmetrics",))


def texts(batch: list[Any]) -> Any:
    values, targets = lists(batch)
    return values, [{"wanted": "text"} for _ in targets]


def measure_texts() -> None:
    detect(
        5,
        loaders={
            name: DataLoader(TensorDataset(torch.ones(5)), 1, collate_fn=texts)
            for name in ("train", "valid")
        },
    )


@pytest.mark.serial
def test_lists_of_what_are_no_tensors_are_refused() -> None:
    with pytest.raises(UserError, match="metric 'items', a Items, keeps 'wanted' as what is no"):
        in_world(2, measure_texts, preload=("torchmetrics",))


# ------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "CrossEntropyLoss takes a tensor, and the model's output is a Fields; write "
             r"SupervisedRunner\(output_key='logits'\)"),
        ({"criterion": ModelLoss(over="samples"), "runner": LabelsToo},
         r"metric 'accuracy' takes a tensor, .* write SupervisedRunner\(output_key='logits'\)"),
        ({"criterion": ModelLoss(over="samples"), "runner": LabelsToo,
          "metrics": {"f": MulticlassAccuracy(4)}},
         r"metric 'f', a MulticlassAccuracy, .* or write SupervisedRunner\(output_key='logits'\)"),
        ({"output_key": "logit"}, "has 'logits', 'loss'; did you mean 'logits'"),
        ({"output_key": 3}, "output_key=3; it must be the name"),
        ({"metrics": {"vald": ["accuracy"]}}, "named for loader 'vald'.*did you mean 'valid'"),
        ({"metrics": {"valid": ["accuracy"], "f": "accuracy"}}, "by loader, and 'f' without one"),
        ({"main_metric": "named_f1"}, "main_metric='named_f1' is not measured"),
    ],
)  # fmt: skip
def test_what_is_meant_must_be_said(changes: dict[str, Any], message: str) -> None:
    model = Net("dataclass").double()
    runner = changes.pop("runner", SupervisedRunner)
    key = changes.pop("output_key", None)
    given = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "datasets": {"batch_size": 8, "train": data(), "valid": data()},
        "metrics": ["accuracy"],
    }
    with pytest.raises(UserError, match=message):
        runner(device="cpu", output_key=key).train(**given | changes)


def test_a_collection_is_taken_apart() -> None:
    two = {"a": MulticlassAccuracy(4), "b": MulticlassAccuracy(4, average="micro")}
    collection = torchmetrics.MetricCollection(two)
    assert list(named_metrics(collection)) == ["a", "b"]
    assert list(named_metrics([collection])) == ["a", "b"]
    assert list(named_metrics({"c": collection})) == ["c_a", "c_b"]
