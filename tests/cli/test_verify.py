"""`allhands verify`: the table, the plot, the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allhands.cli.main import run

RUN = ["data.limit=200", "data.batch_size=16", "model=mlp", "device=cpu"]

# A strategy that makes every gradient half as large.
HALF = """
from allhands.strategies import DDP, STRATEGIES
class Half(DDP):
    name = "half"
    def gradient_scale(self, world):
        return 1 / world.world_size
STRATEGIES["half"] = Half
"""


def allhands_verify(folder: Path, *args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    start = (
        f"import sys\n{code}\nfrom allhands.cli.main import main; main(['verify', *sys.argv[1:]])"
    )
    return subprocess.run(
        [sys.executable, "-c", start, *args], cwd=folder, text=True, capture_output=True
    )


@pytest.mark.serial
def test_the_same_training(tmp_path: Path) -> None:
    earlier = tmp_path / "logs" / "run" / "metrics.csv"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("epoch\n")
    done = allhands_verify(
        tmp_path,
        *RUN,
        "scheduler=OneCycleLR",
        "scheduler.max_lr=0.01",
        "num_epochs=1",
        "--workers",
        "1,2",
    )
    assert done.returncode == 0, done.stderr
    # 200 samples, 16 in a step of one worker: the whole training has 13 steps.
    assert done.stdout.startswith("13 optimizer steps distributed")
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("ddp")] == [
        ["ddp", "1"],
        ["ddp", "2"],
    ]
    assert done.stdout.splitlines()[-1] == "plot: logs/run/verify.png"
    assert sorted(path.name for path in earlier.parent.iterdir()) == ["metrics.csv", "verify.png"]
    assert earlier.read_text() == "epoch\n"


@pytest.mark.serial
def test_a_difference_gives_code_1(tmp_path: Path) -> None:
    args = [*RUN, "--workers", "2", "--strategies", "half", "--steps", "2", "logdir=null"]
    done = allhands_verify(tmp_path, *args, code=HALF)
    assert done.returncode == 1, done.stderr
    assert "DIFFERS" in done.stdout
    assert done.stdout.splitlines()[2].split()[:3] == ["half", "2", "1"]
    assert (
        done.stdout.splitlines()[-1] == "no plot: the run file has no logdir; --plot FILE draws one"
    )


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
def test_without_matplotlib_only_an_explicit_plot_is_refused(tmp_path: Path) -> None:
    hide = "sys.modules['matplotlib'] = None"
    args = [*RUN, "--workers", "1", "--steps", "1"]
    done = allhands_verify(tmp_path, *args, code=hide)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "no plot: a plot needs matplotlib, which is not installed; write pip install"
    )
    refused = allhands_verify(tmp_path, *args, "--plot", "v.png", code=hide)
    assert refused.returncode == 2
    assert "pip install 'allhands[report]'" in refused.stderr
