"""Classes and functions of the user's that a run file names."""

from __future__ import annotations

import sys

import pytest
import torch

from allhands.cli import own_objects, run_objects, run_training
from allhands.cli.main import run as command
from allhands.config import read_run
from allhands.errors import UserError

NET = """
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import allhands
from widths import WIDTH


class Net(nn.Module):
    def __init__(self, num_classes: int, width: int = WIDTH):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes)
        )

    def forward(self, images):
        return self.layers(images)


def smooth(output, target, smoothing: float = 0.0):
    return F.cross_entropy(output, target, label_smoothing=smoothing)


class Slow(torch.optim.SGD):
    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr=lr)


def of_layers(model, lr: float):
    return torch.optim.SGD(model.layers.parameters(), lr=lr)


def halved(optimizer, every: int = 2):
    return torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)


def warm(step):
    return min(1.0, (step + 1) / 3)


def within(output, target, top: int = 2):
    return (output.topk(top, dim=1).indices == target[:, None]).any(1).double().mean()


class Send(allhands.Logger):
    def __init__(self, file):
        self.file = file

    def log(self, values, step):
        with open(self.file, "a") as file:
            print(step, *values, file=file)


class Count(allhands.Callback):
    def __init__(self, by: int = 1):
        self.by, self.steps = by, 0

    def on_step_end(self, training):
        self.steps += self.by

    def on_train_end(self, training):
        Path(f"steps-{training.world.rank}.txt").write_text(str(self.steps))


class Penalised(allhands.Runner):
    def train_step(self, loop, batch):
        def loss_of(batch):
            images, targets = batch
            return self.criterion(loop.model(images), targets)

        loop.step(loss_of, batch)

    def valid_step(self, loop, batch):
        images, targets = batch
        return {"loss": self.criterion(loop.model(images), targets)}


def own(loop, criterion, num_epochs, scale: float = 1.0):
    def loss_of(batch):
        images, targets = batch
        return scale * criterion(loop.model(images), targets)

    for epoch in loop.epochs(num_epochs):
        for batch in epoch.train:
            loop.step(loss_of, batch)
        epoch.evaluate("valid", loss_of)


def idle(loop):
    pass
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "widths.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    fixed = ["data.limit=40", "model=net.py:Net", "logdir=null", "device=cpu", "verbose=false"]
    fixed += ["num_epochs=2"]
    return lambda *overrides: read_run((), [*fixed, *overrides])


OWN = (
    "criterion={name: net.py:smooth, smoothing: 0.1}",
    "optimizer={name: net.py:Slow, lr: 0.05}",
    "scheduler={name: net.py:halved, every: 1}",
    "metrics=[accuracy, {name: net.py:within, top: 3, label: top3}, MulticlassF1Score]",
    "callbacks=[{name: net.py:Count, by: 2}, {name: EarlyStopping, patience: 5}]",
    "loggers=[{name: net.py:Send, file: sent.txt}]",
)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_everything_of_ones_own_is_trained_with_on_one_and_on_two_workers(given, tmp_path):
    single = run_training.train(given(*OWN, "strategy=single", "data.batch_size=8"))
    assert set(single["valid"]) == {"loss", "accuracy", "top3", "MulticlassF1Score"}
    assert single["lr"] == [0.05, 0.025]
    assert (tmp_path / "steps-0.txt").read_text() == "20"
    assert (
        (tmp_path / "sent.txt").read_text().splitlines()[-1].startswith("10 train/loss train/acc")
    )
    both = run_training.train(given(*OWN, "workers=2", "data.batch_size=4"))
    assert (tmp_path / "steps-1.txt").read_text() == "20"
    for loader in ("train", "valid"):
        for name, values in single[loader].items():
            assert both[loader][name] == pytest.approx(values, rel=1e-4), (loader, name)


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_steps_and_loops_of_ones_own(given, tmp_path):
    plain = run_training.train(given("strategy=single", "metrics=[]", "optimizer=sgd"))
    steps = run_training.train(given("strategy=single", "runner=net.py:Penalised", "optimizer=sgd"))
    loop = given(
        "workers=2", "data.batch_size=16", "loop=net.py:own", "optimizer=sgd", "logdir=out"
    )
    looped = run_training.train(loop)
    for history in (steps, looped):
        assert history["valid"]["loss"] == pytest.approx(plain["valid"]["loss"], rel=1e-5)
    assert read_run([tmp_path / "out" / "run.yml"]).config == loop.config


def test_a_function_makes_the_optimizer_of_a_model(given):
    made = run_objects.objects_of(given("optimizer={name: net.py:of_layers, lr: 0.3}"), lambda: 1)
    assert made["optimizer"].defaults["lr"] == 0.3
    assert len(made["optimizer"].param_groups[0]["params"]) == 4


def test_schedulers_inside_of_schedulers_and_functions(given):
    one = "{name: LambdaLR, lr_lambda: net.py:warm}, {name: CosineAnnealingLR, T_max: 7}"
    run = given(
        "optimizer={name: sgd, lr: 0.3}",
        f"scheduler={{name: SequentialLR, schedulers: [{one}], milestones: [3], period: step}}",
    )
    scheduler, period = run_objects.objects_of(run, lambda: 1)["scheduler"]
    assert period == "step"
    assert [type(inner).__name__ for inner in scheduler._schedulers] == [
        "LambdaLR",
        "CosineAnnealingLR",
    ]
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    chained = given("scheduler={name: ChainedScheduler, schedulers: [{name: ConstantLR}]}")
    made = run_objects.objects_of(chained, lambda: 1)["scheduler"][0]
    assert isinstance(made._schedulers[0], torch.optim.lr_scheduler.ConstantLR)
    wrong = given("scheduler={name: ChainedScheduler, schedulers: [{name: ConstantLR, gama: 1}]}")
    with pytest.raises(UserError, match=r"scheduler.schedulers.0.gama = 1: ConstantLR has no such"):
        run_objects.objects_of(wrong, lambda: 1)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=net.py:Nett", "net.py has no class or function 'Nett'.*did you mean 'Net'"),
        ("model=nets.py:Net", "there is no file .*nets.py; did you mean 'net.py'"),
        ("model.widht=3", "model.widht = 3: Net has no such option; did you mean 'width'"),
        ("model.width=big", "model.width = 'big': it must be a number; the default is 8"),
        ("model.width=1.5", "model.width = 1.5: it must be a whole number; the default is 8"),
        ("callbacks=[net.py:warm]", r"callbacks.0: warm needs step"),
        ("loggers=[WandbLoger]", "loggers.0.name = 'WandbLoger': .*'WandbLogger'"),
        ("callbacks=[EarlyStoping]", "callbacks.0.name = 'EarlyStoping': .*'EarlyStopping'"),
        ("runner=net.py:Net", "runner.name = 'net.py:Net': it is no class below allhands.Runner"),
        ("loop=net.py:idle", "idle took no step"),
        ("loop={name: net.py:own, scal: 2}", "loop.scal = 2: own has no such option; .*'scale'"),
        ("metrics=[acuracy]", "there is no such metric; did you mean '[aA]ccuracy'"),
        ("metrics=[{name: F1Score, averag: macro}]", "metrics.0.averag = 'macro': F1Score .*'aver"),
        ("metrics=[{name: F1Score, average: big}]", "metrics.0.average = 'big': it must be 'micr"),
        ("metrics=[accuracy, accuracy]", "metrics.1.*two metrics are named 'accuracy'.*label"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': it must be a number"),
        ("optimizer.foreach=3", "foreach = 3: it must be true or false or null; the default is No"),
        ("scheduler={name: MultiStepLR, milestones: 3}", "milestones = 3: it must be a list"),
        ("scheduler={name: MultiStepLR, milestones: [a]}", "it must be a list .a whole number."),
    ],
)
def test_what_is_wrong_is_told_with_its_place(given, override, said):
    with pytest.raises(UserError, match=said):
        run_training.train(given("strategy=single", override))


def test_loops_of_ones_own_refuse_what_they_decide_themselves(given):
    with pytest.raises(UserError, match="main_metric = 'accuracy': the function that `loop` names"):
        run_training.train(given("loop=net.py:own", "main_metric=accuracy"))
    with pytest.raises(UserError, match="own takes no argument metrics; add it"):
        run_training.train(given("loop=net.py:own", "metrics=[accuracy]", "strategy=single"))


def test_two_files_of_one_run_that_would_be_one_module_are_refused(given, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "net.py").write_text(NET)
    with pytest.raises(UserError, match="would both be the module 'net'; give one"):
        run_training.train(given("criterion=other/net.py:smooth"))
    # In another run it is the other one.
    kind = type(run_objects.objects_of(given(), lambda: 1)["model"])
    made = run_objects.objects_of(given("model=other/net.py:Net"), lambda: 1)["model"]
    assert type(made) is not kind


def test_steps_of_ones_own_are_not_compared_nor_sent_to_sites(given):
    for own in ("runner=net.py:Penalised", "loop=net.py:own"):
        with pytest.raises(UserError, match="write a script, and allhands verify script.py"):
            run_training.verify(given(own), None, None, 3)
        with pytest.raises(UserError, match="sites train by epochs of their own"):
            run_training.definition(given(own, "strategy=federated"))


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("def load(): ...")
    (tmp_path / "my-net.py").write_text("def load(): ...")
    with pytest.raises(UserError, match="a module 'random' is there already; give the file"):
        own_objects.find("random.py:load")
    with pytest.raises(UserError, match="'my-net' is no name of a module; give the file another"):
        own_objects.find("my-net.py:load")


FILE = """\
data: {name: gone.py:load}
model: {name: simple_cnn, widht: 3}
optimizer: {name: adamw, weight_deca: 1, betas: 3}
metrics:
  - acuracy
sede: 3
early_stopping: {patienc: 3}
"""


def test_all_mistakes_are_told_at_once_those_of_the_data_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yml").write_text(FILE)
    assert command(["run", "-C", "run.yml"]) == 2
    said = capsys.readouterr().err
    for text in (
        "run.yml, line 6: sede = 3: there is no such key; did you mean 'seed'?",
        "run.yml, line 7: early_stopping.patienc = 3: there is no such key; did you mean 'patien",
        "run.yml, line 7: early_stopping.patience: this key must be given",
        "error: run.yml, line 1: data: there is no file",
        "run.yml, line 2: model.widht = 3: simple_cnn has no such option; did you mean 'width'",
        "run.yml, line 3: optimizer.weight_deca = 1: AdamW has no such option",
        "run.yml, line 3: optimizer.betas = 3: it must be a list of 2 values",
        "run.yml, line 5: metrics.0.name = 'acuracy': there is no such metric; did you mean",
    ):
        assert text in said
    (tmp_path / "run.yml").write_text(FILE.split("sede", maxsplit=1)[0])
    assert command(["run", "-C", "run.yml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "there is no file" in said[0]
    assert len(said) == 5


def test_a_data_set_that_is_not_there_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALLHANDS_DATA", raising=False)
    assert command(["run", "data=mnist", "optimizer.weight_deca=1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "the data set 'mnist' was not found" in said[0]
    assert "weight_deca" in said[1]
    assert not (tmp_path / "logs").exists()
