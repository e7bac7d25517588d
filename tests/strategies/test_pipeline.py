"""Pipelines against a loop by hand in one process: every schedule, on 2, 3 and 4 workers, with
batches that leave rests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, Mesh, Pipeline, SupervisedRunner, UserError
from allhands.models import GPT, NextToken, ResNet18
from allhands.strategies.pipeline_costs import by_parameters
from allhands.strategies.pipeline_parts import chain_of, cut
from tests.reference import global_batches, relative_difference, train_by_hand
from tests.runner.problems import StopAt
from tests.worlds import in_world

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("preloaded")]

SAMPLES, BATCH, EPOCHS = (
    46,
    10,
    4,
)  # 5 steps an epoch, the last of 6 samples; 10 leaves a rest in 4 micro-batches
VOCABULARY, LENGTH = 13, 6


def away_from_zero(model: nn.Module) -> nn.Module:
    """Biases that begin at 0 stay so small that their relative difference is rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def make_chain() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(8)]
    return away_from_zero(nn.Sequential(*layers, nn.Linear(7, 4)))


def make_gpt() -> nn.Module:
    torch.manual_seed(3)
    return away_from_zero(GPT(VOCABULARY, LENGTH, layers=6, heads=2, width=8))


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(SAMPLES, 7, generator=generator),
        torch.randint(0, 4, (SAMPLES,), generator=generator),
    )
    y[::3] = -100
    return x, y


def words() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0]))
MODELS: dict[str, Any] = {
    "chain": (make_chain, labelled, WEIGHTED),
    "gpt": (make_gpt, words, NextToken()),
}
CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"model": "chain", "microbatches": 4, "accumulate": 2, "optimizer": "adamw"},
    "1f1b": {"model": "gpt", "microbatches": 4, "clip_norm": 0.5},
    "interleaved": {"model": "chain", "microbatches": None, "clip_norm": 0.1},
    "zero_bubble": {"model": "gpt", "microbatches": None, "accumulate": 2},
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)


def train(schedule: str, strategy: Any = None, epochs: int = EPOCHS) -> Any:
    case = CASES[schedule]
    make, data, criterion = MODELS[case["model"]]
    model = make()
    tensors = TensorDataset(*data())
    accumulate = case.get("accumulate", 1)
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=criterion,
        optimizer=make_optimizer(case.get("optimizer", "sgd"), model),
        num_epochs=epochs,
        loaders={
            "train": DataLoader(tensors, BATCH // accumulate, shuffle=True),
            "valid": DataLoader(tensors, BATCH),
        },
        accumulate=accumulate,
        clip_norm=case.get("clip_norm"),
        verbose=False,
        distributed=strategy or Pipeline(schedule=schedule, microbatches=case["microbatches"]),
    )
    return {name: value.clone() for name, value in model.state_dict().items()}, history


def by_hand(schedule: str, share: int = 1, epochs: int = EPOCHS) -> Any:
    case = CASES[schedule]
    make, data, criterion = MODELS[case["model"]]
    model = make()
    optimizer = make_optimizer(case.get("optimizer", "sgd"), model)
    batches = global_batches(SAMPLES, BATCH * share, 42)
    steps = epochs * -(-SAMPLES // (BATCH * share))
    losses = train_by_hand(
        model, criterion, optimizer, data(), batches, steps, case.get("clip_norm")
    )
    model.eval()
    with torch.no_grad():
        return model.state_dict(), losses, float(criterion(model(data()[0]), data()[1]))


MESHES: dict[str, tuple[str, dict[str, Any], str]] = {
    "copies": ("gpipe", {"pp": 2, "dp": 2}, "1f1b"),
    "shards": ("1f1b", {"pp": 2, "dp": {"shard": 2}}, "interleaved"),
    "slices": ("1f1b", {"pp": 2, "tp": 2}, "zero_bubble"),
}


def share(degrees: dict[str, Any]) -> int:
    return 1 if "dp" not in degrees else 2


def all_schedules(meshes: bool) -> list[Any]:
    found = [train(schedule) for schedule in CASES]
    for case, degrees, schedule in MESHES.values() if meshes else ():
        found.append(
            train(case, Mesh(**degrees, pipeline=Pipeline(schedule=schedule, microbatches=4)))
        )
    return found


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.rare
def test_every_schedule_is_the_single_process(workers: int) -> None:
    """On 4 workers also stages that have copies, shards and slices."""
    expected = {schedule: by_hand(schedule) for schedule in CASES}
    if workers == 4:
        expected |= {
            name: by_hand(case, share(degrees)) for name, (case, degrees, _) in MESHES.items()
        }
    for found in in_world(workers, all_schedules, workers == 4):
        for (name, (by_hand_weights, _, loss)), (weights, history) in zip(
            expected.items(), found, strict=True
        ):
            assert relative_difference(weights, by_hand_weights) < 1e-6, name
            assert history["valid"]["loss"][-1] == pytest.approx(loss, rel=1e-5), name


class Doubling(SupervisedRunner):
    """Does something with what the model gives."""

    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0]) * 2, batch[1]


class Twice(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0]) + model(batch[0]), batch[1]


def doubled(criterion: Any) -> Any:
    return lambda output, target: criterion(output * 2, target)


def make_frozen() -> nn.Module:
    """The first stage has nothing to train."""
    model = make_chain()
    for layer in list(model)[:6]:  # type: ignore[call-overload]
        layer.requires_grad_(False)
    return model


def train_frozen(
    runner: type[SupervisedRunner], strategy: Pipeline, damaged: bool = False
) -> dict[str, torch.Tensor]:
    model = make_frozen()
    x, y = labelled()
    if damaged:
        x[23] = float("nan")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    runner(device="cpu").train(
        model=model,
        criterion=WEIGHTED,
        optimizer=optimizer,
        num_epochs=1,
        distributed=strategy,
        verbose=False,
        loaders={"train": DataLoader(TensorDataset(x, y), BATCH)},
    )
    return model.state_dict()


def odd_trainings() -> tuple[Any, str, int]:
    strategy = Pipeline()
    weights = train_frozen(Doubling, strategy)
    with pytest.raises(UserError, match="the training loss is nan on rank 1") as error:
        # The same strategy trains more than once.
        train_frozen(SupervisedRunner, strategy, damaged=True)
    model = ResNet18(width=4)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        num_epochs=1,
        loaders={
            "train": DataLoader(TensorDataset(torch.randn(16, 3, 8, 8), torch.arange(16) % 10), 8)
        },
        distributed=Pipeline(microbatches=4),
        verbose=False,
    )
    return weights, str(error.value), int(model.state_dict()["norm.num_batches_tracked"])


def test_frozen_stages_outputs_that_are_changed_and_losses_that_are_not_finite() -> None:
    expected = make_frozen()
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    train_by_hand(
        expected,
        doubled(WEIGHTED),
        optimizer,
        labelled(),
        global_batches(SAMPLES, BATCH, 0, shuffle=False),
        5,
    )
    for weights, said, tracked in in_world(2, odd_trainings):
        assert relative_difference(weights, expected.state_dict()) < 1e-6
        assert "epoch 1" in said  # on every rank, and before any weight was changed by it
        assert tracked == 8  # BatchNorm's statistics take a step for each micro-batch


def test_a_model_that_is_called_twice_is_refused() -> None:
    with pytest.raises(
        UserError, match="handle_batch calls the model more than once a batch.*distributed='fsdp'"
    ):
        in_world(2, train_frozen, Twice, Pipeline())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Pipeline(schedule="1F1B"),
            "schedule='1F1B'.*one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble'",
        ),
        (
            lambda: Pipeline(stages="layers.1"),
            r"write 'auto', a list of names, stages=\['layers\.1'\], or a function",
        ),
        (
            lambda: Pipeline(stages=3),  # type: ignore[arg-type]
            "stages=….*is a int",
        ),
        (lambda: Pipeline(balance="time"), "one of 'parameters', 'measured'"),
        (lambda: Pipeline(microbatches=0), "microbatches=0.*at least 1"),
        (
            lambda: Pipeline(stages_per_worker=2),
            "one stage a worker; write schedule='interleaved' for 2",
        ),
        (
            lambda: Pipeline(microbatches=3).check_model(make_chain(), 4),
            "microbatches=3.*at least as many. Set microb",
        ),
        (
            lambda: Pipeline("auto", "interleaved", 7).check_model(make_chain(), 2),
            "a multiple. Set microbatches to 8",
        ),
        (
            lambda: Pipeline(schedule="gpipe").check_model(nn.Bilinear(2, 2, 2), 2),
            "takes input1, input2, and a chain takes one",
        ),
        (
            lambda: Pipeline(schedule="interleaved").check_model(make_gpt(), 5),
            "pipeline of 10 stages.*chain of 9",
        ),
        (
            lambda: Mesh(pp=2, dp={"shard": 2}, pipeline=Pipeline(schedule="zero_bubble")),
            "past the hooks by which fully_shard exchanges them. Set schedule to 'interleaved'"
            "|needs PyTorch 2.13",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


class Slow(nn.Module):
    """Has few parameters and takes long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) + torch.zeros(60_000, 1)).mean(1)


class Seen(Callback):
    def on_train_start(self, training: Any) -> None:
        self.names = sorted(name for name, _ in training.model.named_parameters())

    def on_epoch_end(self, training: Any) -> None:
        self.running = training.metrics["train"].running_loss()


def with_a_slow_part() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 90),
        nn.Linear(90, 90),
        nn.Linear(90, 7),
        Slow(),
        nn.Dropout(0.0),
        nn.Linear(7, 4),
    )


def cut_by_time() -> tuple[list[str], float, float]:
    torch.manual_seed(0)
    model = with_a_slow_part()
    x, y = labelled()
    seen = Seen()
    history = SupervisedRunner(device="cpu").train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        num_epochs=1,
        loaders={"train": DataLoader(TensorDataset(x, y), BATCH)},
        distributed=Pipeline(balance="measured"),
        callbacks=[seen],
        verbose=False,
        metrics=["accuracy"],
        log_every=5,
    )
    return seen.names, history["train"]["loss"][0], seen.running


def test_measured_stages_balance_time_and_not_parameters() -> None:
    parts = chain_of(with_a_slow_part())
    _, second = cut(
        parts, 2, "auto", lambda: by_parameters(with_a_slow_part(), parts), nn.Sequential()
    )
    assert second[0].name == "1"
    (_, loss, running), (names, _, _) = in_world(2, cut_by_time)
    assert names == ["5.bias", "5.weight"]
    assert running == pytest.approx(loss)  # rank 0, the first stage, is told at every log


def go_on(logdir: str, strategy: Any, epochs: int, *callbacks: Callback) -> dict[str, torch.Tensor]:
    model = make_gpt()
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=NextToken(),
        optimizer=make_optimizer("sgd", model),
        num_epochs=epochs,
        verbose=False,
        loaders={"train": DataLoader(TensorDataset(*words()), BATCH, shuffle=True)},
        distributed=strategy,
        logdir=logdir,
        resume="auto",
        callbacks=list(callbacks) or [Callback()],
    )
    return model.state_dict()


def test_a_training_goes_on_with_other_stages_and_in_one_process(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch; the momentum of tied weights is known once."""
    in_world(2, go_on, str(tmp_path), Pipeline(microbatches=4), EPOCHS, StopAt(7))
    in_world(3, go_on, str(tmp_path), Pipeline(schedule="interleaved", microbatches=3), EPOCHS - 1)
    weights = go_on(str(tmp_path), None, EPOCHS)
    assert relative_difference(weights, by_hand("zero_bubble")[0]) < 1e-6
