"""A plain `evaluate` or `predict` of the model in training, in a callback on all ranks, on every
strategy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from allhands import (
    FSDP,
    Callback,
    KVStore,
    LocalSGD,
    Mesh,
    OverBatch,
    Pipeline,
    SupervisedRunner,
    Tensor,
)
from allhands.errors import UserError
from tests.runner.problems import classification
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.slow]

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "kvstore": KVStore(),
    "local_sgd": LocalSGD(every=3),
    "fsdp": FSDP(),
    "fsdp, kept whole": FSDP(reshard_after_forward=False),
    "tensor": Tensor(plan={"0": "colwise", "2": "rowwise"}),
    "pipeline": Pipeline(),
}
CRITERION = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)
    )


def measured(
    model: nn.Module | None, runner: SupervisedRunner
) -> tuple[float, float, torch.Tensor]:
    """The loss and the accuracy over 33 samples, and a row for each."""
    given = {"batch_size": 4, "valid": classification(33, seed=2)}
    values = runner.evaluate(
        model=model, criterion=CRITERION, datasets=given, metrics=["accuracy"]
    )["valid"]
    rows = runner.predict(model=model, dataset=classification(33, seed=2), batch_size=4)
    return values["loss"], values["accuracy"], rows


class Freezes(Callback):
    """Keeps BatchNorm in evaluation mode from the third step of an epoch on."""

    def on_step_end(self, training: Any) -> None:
        if training.step % 4 == 3:
            for module in training.model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()


class Measures(Callback):
    """Measures in every hook, by the training's model or the user's own one; `seen` has the last
    values of each."""

    def __init__(self, own: nn.Module) -> None:
        self.own = own
        self.seen: dict[str, Any] = {}

    def measure(self, training: Any, hook: str) -> None:
        modes = [module.training for module in training.model.modules()]
        self.seen[hook] = measured(None, SupervisedRunner(training.model, device="cpu"))
        self.seen[f"{hook}, own"] = measured(self.own, SupervisedRunner(device="cpu"))
        assert [module.training for module in training.model.modules()] == modes

    def on_train_start(self, training: Any) -> None:
        self.measure(training, "on_train_start")

    def on_step_end(self, training: Any) -> None:
        if training.step % 4 == 0:
            self.measure(training, "on_step_end")

    def on_epoch_end(self, training: Any) -> None:
        self.measure(training, "on_epoch_end")


def train(strategy: Any, measures: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = network()
    own = Measures(model)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=CRITERION,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        num_epochs=2,
        datasets={"batch_size": 8, "train": classification(32), "valid": classification(9)},
        callbacks=[Freezes(), own] if measures else [Freezes()],
        distributed=copy.deepcopy(strategy),
    )
    return {name: value.clone() for name, value in model.state_dict().items()}, own.seen


def on_all_strategies(names: list[str]) -> dict[str, Any]:
    return {
        name: (train(STRATEGIES[name], True), train(STRATEGIES[name], False)[0]) for name in names
    }


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return in_world(2, on_all_strategies, list(STRATEGIES))


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_what_one_process_gives_and_the_training_knows_nothing_of_it(
    on_two_ranks: Any, name: str
) -> None:
    (weights, seen), without = on_two_ranks[0][name]
    for key, value in weights.items():
        assert torch.equal(value, without[key]), key
    model = network()
    check(seen["on_train_start"], model)
    model.load_state_dict(weights)
    for hook in ("on_step_end", "on_epoch_end"):
        check(seen[hook], model)
    for hook in ("on_train_start", "on_step_end", "on_epoch_end"):
        check(seen[f"{hook}, own"], seen[hook])
        check(on_two_ranks[1][name][0][1][hook], seen[hook])


def check(seen: Any, expected: Any) -> None:
    if isinstance(expected, nn.Module):
        expected = measured(expected, SupervisedRunner(device="cpu"))
    assert seen[0] == pytest.approx(expected[0], abs=1e-6)
    assert seen[1] == pytest.approx(expected[1], abs=1e-6)
    torch.testing.assert_close(seen[2], expected[2], atol=1e-6, rtol=1e-5)


class Scaled(nn.Module):
    """A layer inside, and a weight outside of all layers, which fully_shard keeps whole after a
    call without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


class Looks(Callback):
    """What else a callback may ask for, and what it is told."""

    def __init__(self, own: nn.Module) -> None:
        self.own = own
        self.shapes: list[Any] = []
        self.told = ""

    def on_epoch_end(self, training: Any) -> None:
        self.kept = model = training.model
        self.shapes.append([list(value.to_local().shape) for value in model.parameters()])
        before = [value.detach().clone() for value in model.parameters()]
        wrapped = measured(nn.Sequential(model, nn.Identity()), SupervisedRunner(device="cpu"))
        check(wrapped, measured(model, SupervisedRunner(device="cpu")))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        self.told = refusal(nn.Sequential(self.own, nn.Identity()))


def refusal(model: nn.Module) -> str:
    with pytest.raises(UserError) as raised:
        measured(model, SupervisedRunner(device="cpu"))
    return str(raised.value)


def look(strategy: Any) -> Looks:
    model = Scaled()
    looks = Looks(model)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=CRITERION,
        optimizer=torch.optim.Adam(model.parameters()),
        num_epochs=2,
        datasets={"batch_size": 4, "train": classification(33), "valid": classification(9)},
        callbacks=[looks],
        distributed=strategy,
    )
    return looks


def looked_at() -> Any:
    looks = look(FSDP(reshard_after_forward=False))
    return looks.told, refusal(looks.kept), looks.shapes


def test_a_part_of_the_model_or_more_is_measured_as_it_lies_or_refused() -> None:
    (holds, later, shapes), _ = in_world(2, looked_at)
    assert shapes == [[[2], [8, 5], [8], [2, 16], [2]]] * 2
    assert "holds the one in training, and strategy 'fsdp' trains that in parts" in holds
    assert "Pass training.model" in holds
    assert "lie in parts on the ranks, and it is not the model of a training that runs now" in later


class Whole(Callback):
    def on_train_start(self, training: Any) -> None:
        def distances(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return torch.cdist(output, output).mean()

        data = {"batch_size": 4, "valid": classification(33)}
        SupervisedRunner(training.model, device="cpu").evaluate(
            criterion=OverBatch(distances), datasets=data
        )


def refused() -> str:
    with pytest.raises(UserError) as raised:
        model = network()
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=CRITERION,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            num_epochs=1,
            datasets={"batch_size": 8, "train": classification(32)},
            callbacks=[Whole()],
            distributed=Pipeline(),
        )
    return str(raised.value)


def test_a_loss_over_the_whole_batch_is_refused_in_a_pipeline() -> None:
    for text in in_world(2, refused):
        assert "criterion=OverBatch(…) with strategy 'pipeline'" in text


MESHES: dict[str, Any] = {
    "dp x tp": lambda: Mesh(dp=2, tp=2, tensor=Tensor(plan={"0": "colwise", "2": "rowwise"})),
    "pp x dp": lambda: Mesh(pp=2, dp=2),
}


def on_meshes() -> Any:
    return {name: train(make(), True) for name, make in MESHES.items()}


# rare: the strategies above are what meshes combine.
@pytest.mark.rare
def test_it_is_so_on_meshes() -> None:
    for weights, seen in in_world(4, on_meshes)[3].values():
        model = network()
        model.load_state_dict(weights)
        check(seen["on_epoch_end"], model)
        check(seen["on_step_end, own"], model)
