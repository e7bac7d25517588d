"""`allhands verify`: the table, the plot, the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from allhands.cli.main import run
from allhands.strategies import DDP, STRATEGIES
from allhands.strategies.base import Bound
from allhands.world import World

pytestmark = pytest.mark.usefixtures("forked_python")

RUN = ["data.limit=200", "data.batch_size=16", "model=mlp", "device=cpu"]


class Half(DDP):
    """Makes every gradient half as large."""

    name = "half"

    def bind(self, model: nn.Module, optimizer: Any, world: World, *options: Any) -> Bound:
        bound = super().bind(model, optimizer, world, *options)
        bound.exchange.gradient_scale /= world.world_size
        return bound


@pytest.mark.serial
def test_the_same_training(tmp_path: Path) -> None:
    earlier = tmp_path / "logs" / "run" / "metrics.csv"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("epoch\n")
    start = "import sys; from allhands.cli.main import main; main(['verify', *sys.argv[1:]])"
    scheduler = ("scheduler=OneCycleLR", "scheduler.max_lr=0.01", "num_epochs=1")
    done = subprocess.run(
        [sys.executable, "-c", start, *RUN, *scheduler, "--workers", "1,2"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "ALLHANDS_CURVES": "1"},
    )
    assert done.returncode == 0, done.stderr
    # 200 samples, 16 in a step of one worker: the whole training has 13 steps.
    assert done.stdout.startswith("13 optimizer steps distributed")
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("ddp")] == [
        ["ddp", "1"],
        ["ddp", "2"],
    ]
    assert done.stdout.splitlines()[-1] == "plot: logs/run/verify.png"
    written = {path.name: path for path in earlier.parent.iterdir()}
    assert sorted(written) == ["metrics.csv", "report.html", "verify.png"]
    page = written["report.html"].read_text()
    assert "distributed, it is the same" in page
    assert "13 optimizer steps distributed" in page
    assert "differences of gradients and parameters by step" in page
    assert earlier.read_text() == "epoch\n"


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_difference_gives_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(STRATEGIES, "half", Half)
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    args = [*RUN, "--workers", "2", "--strategies", "half", "--steps", "2", "logdir=null"]
    assert run(["verify", *args, "--page", "v.html"]) == 1
    assert "distributed, it is DIFFERS" in Path("v.html").read_text()
    said = capsys.readouterr().out
    assert "DIFFERS" in said
    assert said.splitlines()[2].split()[:3] == ["half", "2", "1"]
    assert said.splitlines()[-1] == "no plot: the run file has no logdir; --plot FILE draws one"


def test_a_script_leaves_a_page_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_CURVES", "1")
    Path("train.py").write_text("")
    report = SimpleNamespace(ok=True, section=lambda: "<p>a table</p>")
    monkeypatch.setattr("allhands.verify.script_runs.verify_script", lambda *_, **__: report)
    assert run(["verify", "train.py", "--page", "v.html"]) == 0
    page = Path("v.html").read_text()
    assert "Verified: train.py" in page
    assert "<p>a table</p>" in page


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workers", "two"], "--workers 'two' is no number of workers"),
        (["--workers", "0"], "--workers '0' is no number of workers"),
        (["--workers", ","], "--workers ',' names nothing; write --workers 1,2"),
        (["--strategies", "dpp"], "there is no strategy 'dpp'; did you mean 'dp'?"),
        (["--strategies", "single"], "workers=2 with distributed='single'"),
        (["--steps", "0"], "steps=0; it must be a whole number of optimizer steps"),
        (["--plot", "absent/v.png"], "--plot absent/v.png: there is no folder"),
        (["--page", "absent/v.html"], "--page absent/v.html: there is no folder"),
        (["num_epoch=3"], "did you mean 'num_epochs'?"),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["verify", *RUN, *args, *([] if "--workers" in args else ["--workers", "2"])]) == 2
    err = capsys.readouterr().err
    assert err.startswith("allhands: error: ")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_without_matplotlib_only_an_explicit_plot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    args = [*RUN, "--workers", "1", "--steps", "1"]
    assert run(["verify", *args]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("no plot: a plot needs matplotlib, which is not installed; write pip install")
    )
    assert run(["verify", *args, "--plot", "v.png"]) == 2
    assert "pip install 'allhands[report]'" in capsys.readouterr().err


SCRIPT = """
import sys, torch, allhands
from torch.utils.data import DataLoader, TensorDataset
assert sys.argv[1:] == ["--lr", "0.5"]
model = torch.nn.Linear(3, 1)
loop = allhands.Loop(
    model=model, optimizer=torch.optim.SGD(model.parameters(), float(sys.argv[2])),
    loaders={"train": DataLoader(TensorDataset(torch.randn(8, 3)), 2)},
)
for step in loop.steps(9):
    loop.step(lambda b: loop.model(b[0]).square().mean() * (1 + loop.world.rank), step.batch)
"""


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_script_with_arguments_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    words = ["verify", "train.py", "--steps", "1", "--workers"]
    assert run([*words, "1", "--", "--lr", "0.5"]) == 0
    assert run([*words, "2", "--", "--lr", "0.5"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert run([*words, "2"]) == 2
    assert "AssertionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["absent.py"], "there is no script 'absent.py'"),
        (["true"], "'true' is no Python script; write allhands verify script.py, or KEY=VALUE"),
        (["train.py", "-C", "run.yml"], "both the script 'train.py' and a run file were given"),
    ],
)
def test_what_is_no_script_is_refused(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", *args]) == 2
    assert said in capsys.readouterr().err
