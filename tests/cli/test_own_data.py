"""Data sets that a function of the user's makes for a run file."""

import sys

import pytest
import torch

from allhands.cli import run_data, run_objects, run_training
from allhands.config import read_run
from allhands.errors import UserError

TEXT = """
import torch
from torch.utils.data import TensorDataset


def load(root=None, samples: int = 40, classes=3):
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 6, generator=drawn), torch.arange(samples) % classes
    return {"train": TensorDataset(x, y), "valid": TensorDataset(x[:7], y[:7])}


def fixed(samples=4):
    return load(samples=samples)


def nothing(root):
    return None
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "rows.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = [
        "model.name=mlp",
        "model.in_features=6",
        "model.out_features=3",
        "logdir=null",
        "verbose=false",
    ]

    def made(*overrides):
        return read_run((), ["data.name=rows.py:load", *model, *overrides])

    return made


def test_a_function_s_data_are_trained_on(run):
    given = run(
        "data.options.samples=20", "num_epochs=2", "workers=1", "strategy=single", "device=cpu"
    )
    history = run_training.train(given)
    assert len(history["valid"]["loss"]) == 2


def test_the_function_gets_the_root_and_its_options(run, tmp_path):
    options = run_data.data_options(
        run("data.root=.", "data.options.samples=20", "data.options.classes=2")
    )
    assert options == {"root": str(tmp_path), "samples": 20, "classes": 2}
    assert run_data.data_options(run()) == {"root": None}
    made = run_data.load_datasets("rows.py:load", options)
    assert {name: len(data) for name, data in made.items()} == {"train": 20, "valid": 7}
    assert torch.equal(made["train"].tensors[1][:4], torch.tensor([0, 1, 0, 1]))


def test_a_function_of_a_module_is_found_by_its_name(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert len(run_data.load_datasets("rows:load", {})["train"]) == 40


def test_the_file_with_its_data_section_is_written_and_read_back(run, tmp_path):
    text = run("data.options.samples=20").to_yaml()
    (tmp_path / "run.yml").write_text(text)
    assert read_run([tmp_path / "run.yml"]).config.data.options == {"samples": 20}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.name=gone.py:load"], "data.name = 'gone.py:load'|there is no file"),
        (["data.name=rows.py:lod"], "rows.py has no function 'lod'; it has load, fixed, nothing"),
        (["data.name=no_such_module:load"], "there is no module 'no_such_module'"),
        (["data.name=:load"], "write package.module:function or file.py:function"),
        (
            ["data.options.sampels=3"],
            "the function takes no sampels; it takes root, samples, classes",
        ),
        (["data.options.root=/x"], "write data.root"),
        (["data.name=rows.py:fixed", "data.root=."], "the function takes no root"),
        (["data.limit=5"], "write data.options.limit for a function"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(run, overrides, message):
    with pytest.raises(UserError, match=message):
        run_objects.objects_of(run(*overrides), lambda: 1)


def test_options_of_a_set_of_the_catalogue_are_refused():
    with pytest.raises(
        UserError, match="they are for a function, and 'digits' is in the catalogue"
    ):
        run_objects.objects_of(read_run((), ["data.options.samples=3"]), lambda: 1)


def test_a_schedule_by_steps_needs_its_length_written(run):
    with pytest.raises(UserError, match=r"write scheduler.total_steps"):
        run_objects.objects_of(run("scheduler.name=OneCycleLR", "scheduler.max_lr=0.1"), lambda: 1)
    run_objects.objects_of(
        run("scheduler.name=OneCycleLR", "scheduler.max_lr=0.1", "scheduler.total_steps=30"),
        lambda: 1,
    )


def test_a_function_that_returns_no_data_is_named(run):
    with pytest.raises(
        UserError, match=r"rows.py:nothing returned None; it must return data sets by name"
    ):
        run_data.load_datasets("rows.py:nothing", {"root": None})


def test_a_site_s_definition_has_the_objects_and_the_names_of_classes(run):
    federated = ["strategy.name=federated", "strategy.rounds=2"]
    assert run_training.definition(run(*federated)).labels is None
    made = run_training.definition(read_run((), federated))
    assert list(made.labels) == [str(digit) for digit in range(10)]
    assert made.optimizer.param_groups[0]["params"][0] is next(made.model.parameters())
    with pytest.raises(UserError, match="strategy.name: federated"):
        run_training.definition(run())
