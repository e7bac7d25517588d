"""Scripts written for Catalyst, with only their imports changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands import UserError, catalyst
from allhands.catalyst import dl, utils
from allhands.data import global_order

CLASSES = 6


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(46, 1, 3, 3, generator=generator)
    return TensorDataset(x, (x.flatten(1)[:, :CLASSES]).argmax(1))


def objects() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, CLASSES))
    loader = DataLoader(data(), batch_size=8)
    return {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.02),
        "loaders": {"train": loader, "valid": loader},
    }


def accuracy() -> dl.AccuracyCallback:
    return dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1, 3, 5))


def plain(epochs: int, size: int) -> tuple[dict[str, Any], torch.Tensor]:
    """The weights of a loop by hand, and what it then gives."""
    made = objects()
    model, optimizer = made["model"], made["optimizer"]
    x, y = data().tensors
    for _ in range(epochs):
        for part in torch.arange(len(x)).split(size):
            optimizer.zero_grad()
            made["criterion"](model(x[part]), y[part]).backward()
            optimizer.step()
    return model.state_dict(), model(x).detach()


def test_the_first_example_of_its_readme(tmp_path: Path) -> None:
    made = objects()
    runner = dl.SupervisedRunner(
        input_key="features",
        output_key="logits",
        target_key="targets",
        loss_key="loss",
        device="cpu",
    )
    history = runner.train(
        **made,
        num_epochs=2,
        callbacks=[
            accuracy(),
            dl.PrecisionRecallF1SupportCallback(
                input_key="logits", target_key="targets", num_classes=CLASSES
            ),
            dl.AUCCallback(input_key="logits", target_key="targets", num_classes=CLASSES),
            dl.CriterionCallback(input_key="logits", target_key="targets", metric_key="loss"),
            dl.OptimizerCallback(metric_key="loss"),
            dl.EarlyStoppingCallback(
                patience=3, loader_key="valid", metric_key="accuracy01", minimize=False
            ),
        ],
        logdir=str(tmp_path / "logs"),
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        verbose=True,
    )
    weights, logits = plain(2, 8)
    for name, value in made["model"].state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    places = logits.topk(3, dim=1).indices
    target = data().tensors[1]
    expected = {
        "accuracy01": (places[:, 0] == target).float().mean().item(),
        "accuracy03": (places == target[:, None]).any(1).float().mean().item(),
        "loss": nn.functional.cross_entropy(logits, target).item(),
    }
    for name, value in expected.items():
        assert history["valid"][name][-1] == pytest.approx(value, abs=1e-6)
    assert history["valid"]["accuracy"] == history["valid"]["accuracy01"]
    assert history["valid"]["precision/_micro"][-1] == pytest.approx(expected["accuracy01"])
    assert {"f1/_macro", "recall/_weighted", "auc/_macro"} < history["valid"].keys()
    assert (tmp_path / "logs" / "metrics.csv").is_file()

    loader = made["loaders"]["valid"]
    metrics = runner.evaluate_loader(loader=loader, callbacks=[accuracy()])
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6)
    predicted = [one["logits"] for one in runner.predict_loader(loader=loader)]
    assert [len(rows) for rows in predicted] == [8] * 5 + [6]
    torch.testing.assert_close(torch.cat(predicted), logits, rtol=0, atol=1e-5)
    one = runner.predict_batch(next(iter(loader)))
    torch.testing.assert_close(one["logits"], logits[:8], rtol=0, atol=1e-5)
    assert not one["logits"].requires_grad


@pytest.mark.serial
def test_workers_train_the_same(preloaded: None) -> None:
    made = objects()
    loader = DataLoader(data(), batch_size=4)
    made["loaders"] = {"train": loader, "valid": loader}
    runner = dl.SupervisedRunner(device="cpu")
    history = runner.train(
        **made, num_epochs=2, callbacks={"accuracy": accuracy()}, ddp=True, workers=2
    )
    weights, logits = plain(2, 8)
    for name, value in made["model"].state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)
    share = (logits.argmax(1) == data().tensors[1]).float().mean().item()
    assert history["valid"]["accuracy01"][-1] == pytest.approx(share, abs=1e-6)


def datasets(num_features: int) -> dict[str, Any]:
    x = torch.randn(46, num_features, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1))  # a target without the dimension that the output has
    return {"train": data, "valid": data}


def regression() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(5, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_by_datasets(distributed: bool) -> list[torch.Tensor]:
    """As the last script of its tutorial about distributed training has it."""
    model, optimizer = regression()
    dl.SupervisedRunner(device="cpu").train(
        model=model,
        datasets={"batch_size": 4, "get_datasets_fn": datasets, "num_features": 5},
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]),
        num_epochs=2,
        distributed=distributed,
        **({"workers": 2} if distributed else {}),
    )
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.serial
def test_the_scripts_of_its_tutorial_train_as_one_process(
    preloaded: None, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = regression()
    x, y = datasets(5)["train"].tensors
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 if epoch == 0 else 0.01
        for part in global_order(len(x), 42, epoch).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[part]).squeeze(1), y[part]).backward()
            optimizer.step()
    found = [
        train_by_datasets(True),
        dl.utils.distributed_cmd_run(train_by_datasets, True, False, workers=2),
    ]
    for weights in found:
        for value, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-6)
    assert "the target of shape [4] is read in the output's shape, [4, 1]" in capfd.readouterr().out


def test_shapes_that_would_broadcast_stay_an_error() -> None:
    model = nn.Linear(5, 2)
    with pytest.raises(UserError, match=r"has shape \[8, 2\] and the target \[8\]; the criterion"):
        dl.SupervisedRunner(device="cpu").train(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            datasets={"batch_size": 8, **datasets(5)},
        )


def test_callbacks_that_are_arguments() -> None:
    made, found = objects(), {}

    class Look(dl.Callback):
        def on_train_start(self, training: Any) -> None:
            found.update(vars(training.settings))

    scheduler = torch.optim.lr_scheduler.ExponentialLR(made["optimizer"], 0.5)
    history = dl.SupervisedRunner().train(
        **made,
        scheduler=scheduler,
        callbacks=[
            dl.OptimizerCallback(
                accumulation_steps=2,
                grad_clip_fn=nn.utils.clip_grad_norm_,
                grad_clip_params={"max_norm": 0.5},
            ),
            dl.SchedulerCallback(mode="batch", loader_key="valid", metric_key="loss"),
            dl.CheckRunCallback(),
            dl.TimerCallback(),
            Look(),
        ],
        initial_seed=7,
        cpu=True,
        timeit=True,
    )
    wanted = {"accumulate": 2, "clip_norm": 0.5, "check": True, "seed": 7, "valid_loader": "valid"}
    assert wanted.items() < found.items()
    assert history["lr"] == pytest.approx([0.02 * 0.5**steps for steps in (0, 3, 6)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dl.LRFinder, r"dl.LRFinder is not here; write torch.optim.lr_scheduler"),
        (lambda: catalyst.ConfusionMatrixCallback, r"train\(metrics="),
        (lambda: utils.trace_model, "torch.export.export"),
        (lambda: dl.SupervisedRunner(engine=object()), r"train\(distributed"),
        (
            lambda: dl.SupervisedRunner(output_key=["a", "b"], device="cpu").train(**objects()),
            "output_key=\\['a', 'b'\\].*the model's output is Tensor",
        ),
        (
            lambda: train(callbacks=[dl.AUCCallback("logits", "targets", num_classes=7)]),
            r"must be \[samples, 7\]",
        ),
        (lambda: train(callbacks=[dl.CheckpointCallback(topk=3)]), "pass logdir=… to train"),
        (lambda: dl.OptimizerCallback(grad_clip_fn=max), "grad_clip_fn=torch.nn.utils"),
        (lambda: dl.SchedulerCallback(mode="step"), "it is 'batch', 'epoch' or None"),
        (lambda: train(valid_metrik="loss"), "no argument 'valid_metrik'"),
        (lambda: train(loggers={}, valid_metric="loss"), None),
        (lambda: train(loggers={"csv": 1}), r"train\(loggers=…\): an? int is no logger"),
        (lambda: train(valid_metric="loss", main_metric="x"), "are one argument"),
        (lambda: train(fp16=True, precision="bf16"), "fp16=True and precision='bf16'"),
        (lambda: train(callbacks=[dl.SchedulerCallback(mode="epoch")]), "needs train.scheduler"),
        (lambda: train(callbacks=[dl.AccuracyCallback("scores")]), "asks for 'scores'"),
        (lambda: train(callbacks=[dl.AccuracyCallback(), dl.AccuracyCallback()]), "two metrics"),
        (
            lambda: train(callbacks=[dl.CheckpointCallback(metric_key="a")], valid_metric="b"),
            "CheckpointCallback says main_metric='a'",
        ),
    ],
)
def test_what_is_not_here_is_named(make: Any, said: str | None) -> None:
    if said is None:
        make()
        return
    with pytest.raises(UserError, match=said):
        make()


def train(**given: Any) -> Any:
    return dl.SupervisedRunner(device="cpu").train(**objects(), **given)


def test_names_that_nobody_has_are_missing_as_usual() -> None:
    assert not hasattr(dl, "Nothing")
    assert not hasattr(utils, "nothing")
    assert catalyst.SupervisedRunner is dl.SupervisedRunner
    assert issubclass(dl.SupervisedRunner, allhands.SupervisedRunner)
