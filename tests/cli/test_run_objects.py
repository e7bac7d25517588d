"""What the names in a run file become."""

from __future__ import annotations

import pytest
import torch

from allhands import models
from allhands.cli import run_data, run_objects, run_schedulers, run_training
from allhands.cli.run_objects import strategy_from
from allhands.config import read_run
from allhands.data import catalogue
from allhands.errors import UserError


def run_file(*overrides: str):
    return read_run((), overrides)


def built(function, *overrides: str, **given):
    return function(run_file(*overrides), **given)


def refused(function, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        function(run_file(*overrides))
    return str(caught.value)


def model_of(run):
    return run_objects.model_of(run, run_data.entry_of(run))


def optimizer_of(run):
    return run_objects.optimizer_of(run, torch.nn.Linear(2, 2))


def scheduler_of(run):
    return run_schedulers.scheduler_of(
        run, optimizer_of(run), run_data.entry_of(run), lambda: run.config.workers or 1
    )


def test_initial_weights_are_a_function_of_the_seed():
    def weights(*overrides: str) -> torch.Tensor:
        torch.rand(3)  # what was drawn before does not matter
        return torch.cat([p.flatten() for p in built(model_of, *overrides).parameters()])

    assert torch.equal(weights("seed=1"), weights("seed=1"))
    assert not torch.equal(weights("seed=1"), weights("seed=2"))


@pytest.mark.parametrize(
    ("data", "model", "shape", "classes"),
    [
        ("digits", "simple_cnn", (2, 1, 8, 8), 10),
        ("mnist", "mlp", (2, 1, 28, 28), 10),
        ("cifar10", "simple_cnn", (2, 3, 32, 32), 10),
        ("cifar100", "resnet18", (2, 3, 32, 32), 100),
    ],
)
def test_a_model_gets_the_sizes_of_its_data(data, model, shape, classes):
    made = built(model_of, f"data={data}", f"model={model}")
    assert made(torch.zeros(shape)).shape == (2, classes)


def test_sizes_can_be_set():
    made = built(model_of, "model.num_classes=12", "model.width=4")
    assert made(torch.zeros(1, 1, 8, 8)).shape == (1, 12)
    assert built(model_of, "data=cifar100", "data.labels=coarse")(
        torch.zeros(1, 3, 32, 32)
    ).shape == (1, 20)


def test_a_model_option_that_does_not_exist():
    assert "command line, model.widht=3: model" in refused(model_of, "model.widht=3")
    assert "simple_cnn" in refused(model_of, "model=simpel_cnn")


def test_an_optimizer_by_any_spelling():
    assert type(built(optimizer_of, "optimizer=sgd", "optimizer.lr=0.1")) is torch.optim.SGD
    assert type(built(optimizer_of, "optimizer=AdamW")) is torch.optim.AdamW
    made = built(optimizer_of, "optimizer=adam", "optimizer.lr=1e-2", "optimizer.betas=[0.8, 0.9]")
    assert made.defaults["lr"] == 0.01
    assert made.defaults["betas"] == (0.8, 0.9)


def test_muon_for_the_matrices_of_a_model():
    def of_gpt(run):
        return run_objects.optimizer_of(run, models.gpt(layers=1, width=8))

    made = built(of_gpt, "optimizer=muonadamw", "optimizer.lr=1e-2", "optimizer.muon_lr=0.05")
    groups = [(group["muon"], group["lr"], len(group["params"])) for group in made.param_groups]
    assert groups == [(False, 0.01, 12), (True, 0.05, 4)]
    assert "MuonAdamW has no such option; did you mean 'muon_lr'?" in refused(
        of_gpt, "optimizer=muonadamw", "optimizer.muonlr=1"
    )
    assert "no linear layer before the last one" in refused(optimizer_of, "optimizer=muonadamw")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "optimizer.weight_deca=1",
            "optimizer.weight_deca = 1: AdamW has no such option; did you mean 'weight_decay'?",
        ),
        ("optimizer.amsgrad=1", "optimizer.amsgrad = 1: it must be true or false"),
        (
            "optimizer.weight_decay=a",
            "optimizer.weight_decay = 'a': it must be a number; the default is 0.01",
        ),
        ("optimizer.betas=[0.9]", "it must be a list of 2 values, such as [0.9, 0.999]"),
        ("optimizer.betas=0.9", "it must be a list of 2 values"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer: Invalid beta parameter at index 1"),
        ("optimizer.params=3", "AdamW has no such option"),
    ],
)
def test_an_optimizer_option_that_is_wrong(override, said):
    text = refused(optimizer_of, override)
    assert text.startswith(f"command line, {override}: ")
    assert said in text


def criterion_of(run):
    return run_objects.criterion_of(run)


def test_criteria():
    made = built(criterion_of, "criterion.label_smoothing=0.1")
    assert type(made) is torch.nn.CrossEntropyLoss
    assert made.label_smoothing == 0.1
    assert type(built(criterion_of, "criterion=huberloss")) is torch.nn.HuberLoss
    assert "did you mean 'cross_entropy'?" in refused(criterion_of, "criterion=crossentropi")


def test_strategy_settings():
    made = built(strategy_from, "strategy.find_unused_parameters=true")
    assert made.find_unused_parameters is True
    assert "did you mean 'ddp'?" in refused(strategy_from, "strategy=dddp")
    assert "did you mean 'find_unused_parameters'?" in refused(
        strategy_from, "strategy.find_unused=true"
    )
    assert "it must be true or false" in refused(strategy_from, "strategy.static_graph=1")
    made = built(
        strategy_from,
        "strategy.compress={name: powersgd, rank: 2}",
        "strategy.bucket_cap_mb=measured",
    )
    assert (made.compress, made.bucket_cap_mb) == (
        {"name": "powersgd", "rank": 2, "start": 10},
        "measured",
    )


@pytest.mark.parametrize("strategy", ["ddp", "kvstore", "local_sgd", "federated"])
def test_compress_is_one_word_for_all_strategies(strategy):
    name = f"strategy.name={strategy}"
    made = built(strategy_from, name, "strategy.compress={name: topk, keep: 0.05}")
    chosen = made.compression.options if strategy == "federated" else made.compress
    assert chosen["keep"] == 0.05
    assert built(strategy_from, name, "strategy.compress=int8")
    said = refused(strategy_from, name, "strategy.compress=int9")
    assert (
        "compress='int9'): there is no codec 'int9'; did you mean 'int8'? Known are: fp16, bf16, "
        "int8" in said
    )
    said = refused(strategy_from, name, "strategy.compress={name: topk, kep: 0.05}")
    assert "the codec 'topk' has no option 'kep'; did you mean 'keep'? Its options: keep" in said


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("data.root=null", 2 * 30),  # 1,437 samples, 48 in a step
        ("accumulate=2", 2 * 15),
        ("data.drop_last=true", 2 * 29),
        ("data.limit=100", 2 * 3),
        ("scheduler.period=epoch", 2),
        ("check=true", 3 * 3),
        ("overfit=true", 2 * 1),
        ("scheduler.total_steps=77", 77),
        ("max_steps=50", 50),
        ("max_steps=1000", 2 * 30),
    ],
)
def test_the_length_of_a_training_is_filled_in(override, steps):
    fixed = [
        "data.batch_size=16",
        "workers=3",
        "num_epochs=2",
        "device=cpu",
        "scheduler=OneCycleLR",
        "scheduler.max_lr=0.1",
    ]
    made, period = built(scheduler_of, *fixed, override)
    assert made.total_steps == steps
    assert period == ("epoch" if override == "scheduler.period=epoch" else "step")


def test_the_length_of_a_training_by_steps_is_filled_in():
    given = ("data.batch_size=16", "workers=3", "device=cpu", "max_steps=70")
    by_epoch = built(scheduler_of, *given, "scheduler=CosineAnnealingLR")
    assert by_epoch[0].T_max == 3  # 30 steps an epoch
    by_step = ("scheduler=CosineAnnealingLR", "scheduler.period=step")
    assert built(scheduler_of, *given, *by_step)[0].T_max == 70
    shorter = ("steps_per_epoch=7", "scheduler=CosineAnnealingLR")
    assert built(scheduler_of, *given, *shorter)[0].T_max == 10


def test_schedulers():
    assert built(scheduler_of) is None
    made, period = built(scheduler_of, "scheduler=multisteplr", "scheduler.milestones=[3, 6]")
    assert type(made) is torch.optim.lr_scheduler.MultiStepLR
    assert period == "epoch"
    assert built(scheduler_of, "scheduler=CosineAnnealingLR", "num_epochs=7")[0].T_max == 7
    assert "StepLR needs step_size; write scheduler.step_size: …" in refused(
        scheduler_of, "scheduler=StepLR"
    )
    assert "did you mean 'StepLR'" in refused(scheduler_of, "scheduler=StepRL")
    assert "LambdaLR needs lr_lambda" in refused(scheduler_of, "scheduler=LambdaLR")


def test_data_options():
    assert built(run_data.data_options, "data.limit=5") == {"limit": 5}
    assert "the data set 'digits' has no such option" in refused(
        run_data.data_options, "data.labels=fine"
    )
    assert "did you mean 'cifar10'" in refused(run_data.entry_of, "data=cifar1")
    made = run_data.load_datasets("digits", {"limit": 5})
    assert [len(made[split]) for split in ("train", "valid")] == [5, 5]
    assert len(catalogue.load("digits", "train")) == 1437


FEDERATED = ("strategy=federated", "strategy.clients=20", "strategy.per_round=5")


def test_federated_with_options_that_have_options():
    made = built(
        strategy_from,
        *FEDERATED,
        "strategy.algorithm.name=fedprox",
        "strategy.algorithm.mu=0.5",
        "strategy.local_epochs=5",
        "strategy.partition.name=dirichlet",
        "strategy.partition.alpha=0.5",
        "strategy.rounds=50",
    )
    assert (made.clients, made.per_round, made.rounds, made.local_epochs) == (20, 5, 50, 5)
    assert (made.algorithm.name, made.algorithm.mu) == ("fedprox", 0.5)
    assert made.partition == {"name": "dirichlet", "alpha": 0.5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (("strategy.per_roud=5",), "did you mean 'per_round'"),
        (("strategy.algorithm.name=fedprox", "strategy.algorithm.mue=1"), "did you mean 'mu'"),
        (("strategy.algorithm=fedpro",), "did you mean 'fedprox'"),
        (("strategy.per_round=30",), "write per_round=20"),
        (("strategy.rounds=many",), "strategy.rounds = 'many': it must be a number"),
        (("strategy.on_client_failure=ignore",), "'stop', 'retry', 'skip'"),
        (("strategy.stages=Mine",), "class derived from allhands.federated.Rounds"),
    ],
)
def test_a_federated_option_that_is_wrong(override, said):
    assert said in refused(strategy_from, *FEDERATED, *override)


def test_federated_training_goes_by_rounds():
    said = refused(run_training.train, *FEDERATED, "num_epochs=3")
    assert "command line, num_epochs=3" in said
    assert "strategy.rounds" in said
    said = refused(run_training.train, *FEDERATED, "max_steps=3")
    assert "max_steps=3 with distributed=Federated(…)" in said
    made, period = built(
        scheduler_of, *FEDERATED, "strategy.rounds=7", "scheduler=OneCycleLR", "scheduler.max_lr=1"
    )
    assert (period, made.total_steps) == ("epoch", 7)


def test_a_federated_run_file_is_not_compared_step_by_step():
    with pytest.raises(UserError, match=r"strategy.name = .federated.*leave it out"):
        run_training.verify(run_file(*FEDERATED), ["ddp", "federated"], [1, 2], 3)


TEXT = ("data=shakespeare", "model=gpt", "criterion=next_token", "metrics=[]")


def test_text_fills_in_the_sizes_of_the_gpt_and_the_length_of_the_training():
    made = built(model_of, *TEXT, "data.block=16", "model.width=8")
    assert made.embed.weight.shape == (65, 8)
    assert made.position.weight.shape == (16, 8)
    assert built(model_of, *TEXT, "model.width=8").position.weight.shape == (128, 8)
    assert built(run_data.data_options, *TEXT, "data.block=16", "data.limit=5") == {
        "limit": 5,
        "block": 16,
    }
    schedule = (
        "scheduler=OneCycleLR",
        "scheduler.max_lr=0.1",
        "num_epochs=2",
        "workers=2",
        "device=cpu",
        "data.block=64",
    )
    # 15,685 samples, 64 in a step.
    assert built(scheduler_of, *TEXT, *schedule)[0].total_steps == 2 * 246


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=mlp", "write model.name: gpt"),
        ("criterion=cross_entropy", "write criterion: next_token"),
        ("metrics=[accuracy]", "write metrics: []"),
        ("strategy=federated", "name a function of your own"),
    ],
)
def test_what_has_no_meaning_for_text_is_refused(override, said):
    assert said in refused(run_data.entry_of, *TEXT, override)
    assert "the data set 'digits' has no such option" in refused(
        run_data.data_options, "data.block=16"
    )
