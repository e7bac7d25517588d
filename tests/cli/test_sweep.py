"""`allhands sweep`."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from allhands.cli.sweep_space import Between, Study, space_of
from allhands.errors import UserError
from tests.cli import projects
from tests.cli.projects import said

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    projects.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def table() -> list[dict[str, str]]:
    with Path("logs/sweep/trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.serial
def test_a_grid_is_trained_and_goes_on_where_it_was_stopped(project, capsys, monkeypatch):
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    words = ("sweep", "-C", "run.yml", "--over", "optimizer.lr=1e-4,0.3", "--over",
             "data.options.fails=false,true", "num_epochs=2", "--parallel", "2")  # fmt: skip
    text = said(capsys, *words, code=1)
    assert "2 failed: see output.txt in their folders; the same call tries again" in text
    assert text.splitlines()[-2] == "best: logs/sweep/trial-003"
    assert [(row["state"], row["optimizer.lr"]) for row in table()] == [
        ("done", "0.0001"), ("failed", "0.0001"), ("done", "0.3"), ("failed", "0.3"),
    ]  # fmt: skip
    assert "these data are bad" in (project / "logs/sweep/trial-002/output.txt").read_text()
    assert (project / "logs/sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    # What is done is not done again. The module is longer now: Python takes what it has compiled
    # for a file of the same length and second.
    good = (project / "samples.py").read_text().replace("if fails:", "if fails and False:")
    (project / "samples.py").write_text(good)
    again = said(capsys, *words)
    assert "trial-001:" not in again
    assert "trial-002:" in again
    assert {row["state"] for row in table()} == {"done"}
    assert "the folder of another sweep (run: " in said(capsys, *words, "seed=3", code=2)


def test_what_optuna_is_told_decides_what_it_proposes():
    pytest.importorskip("optuna")
    space = space_of(["model.width=8,16"], ["optimizer.lr=1e-5..1e-1:log", "accumulate=1..4"])
    assert space.between == {
        "optimizer.lr": Between(1e-5, 1e-1, True),
        "accumulate": Between(1, 4),
    }
    study = Study(space, seed=1, smaller=True)
    for number in range(1, 30):
        values = study.ask(number)
        assert values["model.width"] in (8, 16)
        assert isinstance(values["accumulate"], int)
        study.tell(number, values, abs(values["optimizer.lr"] - 0.01) if number % 5 else None)
    late = [study.ask(number)["optimizer.lr"] for number in range(30, 40)]
    assert sorted(late)[5] > 1e-3  # a sixth of the range by magnitude
    taken_up = Study(space, seed=2, smaller=True)
    taken_up.tell(1, {"model.width": 8, "optimizer.lr": 0.1, "accumulate": 2}, 0.5)
    assert taken_up._study.best_value == 0.5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to try; write --over"),
        (["--over", "optimizer.lr"], "write key=value,value"),
        (["--over", "optimiser.lr=1,2"], "there is no such key; did you mean 'optimizer'"),
        (["--over", "num_epochs=2,x"], "it must be a whole number"),
        (["--over", "optimizer.lrr=1,2"], "has no such option; did you mean 'lr'"),
        (["--over", "strategy=ddp,dpp"], "there is no such strategy; did you mean 'dp'"),
        (["--over", "seed=1,2", "--between", "seed=1..4", "--trials", "2"], "is given twice"),
        (["--over", "workers=1,2"], "a sweep sets it for each of its trainings; write --workers-e"),
        (["--over", "seed=1", "logdir=x"], "logdir: a sweep sets it .*write --logdir"),
        (["--between", "optimizer.lr=1e-5..1e-1:log"], "--between needs --trials"),
        (["--over", "seed=1", "--trials", "3"], "--trials .*goes with --between"),
        (["--between", "optimizer.lr=3", "--trials", "3"], "write key=low..high"),
        (["--between", "optimizer.lr=0..1:log", "--trials", "3"], "more than 0 with :log"),
    ],
)
def test_what_cannot_be_tried_is_said(project, capsys, words, text):
    assert re.search(text, said(capsys, "sweep", "-C", "run.yml", *words, code=2))
    assert not (project / "logs").exists()


def test_without_optuna_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'allhands\[sweep\]', or --over"):
        Study(space_of([], ["optimizer.lr=1..2"]), 1, True)


def test_the_definition_is_stored_as_json(project, capsys):
    said(capsys, "sweep", "-C", "run.yml", "--over", "optimizer.lr=0.1", "num_epochs=1")
    stored = json.loads((project / "logs/sweep/sweep.json").read_text())
    assert stored["space"] == {"between": {}, "over": {"optimizer.lr": [0.1]}}
    assert stored["workers"] == 1
