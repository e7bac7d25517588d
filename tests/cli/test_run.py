"""`allhands run`: from a run file to a trained model in the logdir."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from allhands.cli.main import run
from allhands.config import read_run
from tests import fork_client

pytestmark = pytest.mark.usefixtures("forked_python")


def allhands_run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from allhands.cli.main import main; main(['run', *sys.argv[1:]])"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=folder, text=True, capture_output=True
    )


def rows(logdir: Path) -> list[dict[str, str]]:
    with (logdir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_a_run_is_stored_and_can_be_repeated(tmp_path, monkeypatch):
    first = allhands_run(
        tmp_path, "num_epochs=2", "data.limit=200", "workers=2", "logdir=one", "optimizer.lr=1e-2"
    )
    assert first.returncode == 0, first.stderr
    assert "ddp, 2 workers on" in first.stdout
    stored = read_run([tmp_path / "one" / "run.yml"]).config
    assert (stored.optimizer.lr, stored.workers, stored.data.limit) == (0.01, 2, 200)

    monkeypatch.chdir(tmp_path)
    assert run(["run", "-C", "one/run.yml", "logdir=two"]) == 0
    names = ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy")
    numbers = [
        [row[name] for name in names for row in rows(tmp_path / logdir)]
        for logdir in ("one", "two")
    ]
    # To the last digit: same seed, same initial weights, same order.
    assert numbers[0] == numbers[1]


def test_single_process_and_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("strategy=single", "data.limit=64", "logdir=out", "device=cpu")
    assert run(["run", *args, "num_epochs=1"]) == 0
    assert run(["run", *args, "num_epochs=2", "resume=auto"]) == 0
    assert len(rows(tmp_path / "out")) == 2
    assert read_run([tmp_path / "out" / "run.yml"]).config.num_epochs == 2


def test_an_earlier_run_file_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("strategy=single", "data.limit=32", "num_epochs=1", "logdir=out", "device=cpu")
    for seed in (1, 2):
        assert run(["run", *args, f"seed={seed}"]) == 0
    assert read_run([tmp_path / "out" / "earlier-1" / "run.yml"]).config.seed == 1
    assert read_run([tmp_path / "out" / "run.yml"]).config.seed == 2


def test_show_prints_the_whole_file_and_trains_nothing(tmp_path):
    done = allhands_run(tmp_path, "--show", "optimizer=sgd", "optimizer.momentum=0.9")
    assert done.returncode == 0, done.stderr
    (tmp_path / "shown.yml").write_text(done.stdout)
    assert (
        read_run([tmp_path / "shown.yml"]).config
        == read_run((), ["optimizer=sgd", "optimizer.momentum=0.9"]).config
    )
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["num_epoch=3"],
            "command line, num_epoch=3: num_epoch = 3: there is no such key; did you mean "
            "'num_epochs'?",
        ),
        (["-C", "absent.yml"], "the run file 'absent.yml' cannot be read"),
        (["run.yml"], "write key=value"),
        (
            ["optimizer=adamv"],
            "optimizer.name = 'adamv': there is no such optimizer; did you mean 'Adam",
        ),
        (["workers=2", "strategy=single"], "workers=2"),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["run", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("allhands: error: ")
    assert said in err
    assert "Traceback" not in err


def test_a_mistake_in_a_file_is_told_before_torch_is_imported():
    code = (
        "import sys; from allhands.cli.main import run; run(['run', 'seed=x']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([fork_client.PYTHON, "-c", code], capture_output=True)
    assert done.returncode == 0


@pytest.mark.serial
@pytest.mark.usefixtures("preloaded")
def test_programs_get_json_or_nothing(tmp_path):
    small = ("num_epochs=1", "data.limit=64", "workers=2", "logdir=out")
    done = allhands_run(tmp_path, *small, "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (row,) = [line["row"] for line in lines if "row" in line]
    assert row["valid loss"] == float(rows(tmp_path / "out")[0]["valid_loss"])
    assert row["samples/s"] == pytest.approx(64 / row["seconds"])
    assert allhands_run(tmp_path, *small, "--quiet").stdout == ""
    both = allhands_run(tmp_path, *small, "--quiet", "--json")
    assert both.returncode == 2
    assert "leave one of them out" in both.stderr
