"""The examples of own loops: each trains what a loop by hand trains in one process, on one, two and
three workers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.examples import own_loop_table
from tests.examples.own_loops import CASES, Case
from tests.examples.running import EXAMPLES, program, run_in
from tests.worlds import in_world

pytestmark = pytest.mark.usefixtures("forked_python")


def difference(case: Case, workers: int) -> float:
    return case.difference(case.train(workers))


@pytest.mark.serial
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_train_the_loop_by_hand(name: str, workers: int) -> None:
    case = CASES[name]()
    if workers == 1:
        assert difference(case, 1) < 1e-5
    else:
        assert max(in_world(workers, difference, case, workers)) < 1e-5


def resumed(case: Case, shares: int, folder: Path, strategy: str) -> float:
    """Trains two epochs, and goes on to the end."""
    options = {"logdir": folder, "resume": "auto", "strategy": strategy}
    whole, case.given = case.given, {"epochs": 2}
    case.train(shares, **options)
    case.given = whole
    return case.difference(case.train(shares, **options))


@pytest.mark.serial
def test_a_moving_average_goes_on_in_shards(tmp_path: Path) -> None:
    case = CASES["ema"]()
    assert max(in_world(2, resumed, case, 2, tmp_path, "fsdp")) < 1e-5


SMALL = {
    "dcgan": ["--epochs", "1", "--limit", "48"],
    "simclr": ["--epochs", "1", "--limit", "96"],
    "distillation": ["--epochs", "1", "--limit", "96"],
    "wgan_gp": ["--steps", "100", "--limit", "48"],
    "gpt": ["--steps", "4", "--every", "2", "--limit", "6000", "--logdir", "logs"],
    "ema": ["--epochs", "1", "--limit", "96"],
    "sam": ["--epochs", "1", "--limit", "96"],
    "ppo": ["--iterations", "10", "--carts", "2", "--length", "8"],
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_a_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL[name]])
    runpy.run_path(str(EXAMPLES / "own_loop" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "single, 1 worker" in said
    assert "peak memory" in said  # it has come to the end
    assert (tmp_path / "logs" / "metrics.csv").exists() == (name == "gpt")


def test_all_of_them_are_tested() -> None:
    found = {path.stem for path in (EXAMPLES / "own_loop").glob("*.py")}
    assert found == SMALL.keys() == CASES.keys()
    page = own_loop_table.read()
    assert page.keys() == own_loop_table.COLUMNS.keys()
    assert not [mark for column in page.values() for mark in column if "WRONG" in mark]


@pytest.mark.rare
@pytest.mark.serial
@pytest.mark.parametrize("column", own_loop_table.COLUMNS)
def test_the_page_says_what_strategies_do(column: str) -> None:
    found = own_loop_table.cells(column, [make() for make in CASES.values()])
    assert found == own_loop_table.read()[column], "renew docs/loop.md with `make conformance`"


@pytest.mark.serial
def test_they_run_under_a_launcher(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop" / "simclr.py")
    text = run_in(tmp_path, program("allhands"), "launch", "-n", "2", script, *SMALL["simclr"])
    assert "ddp, 2 workers" in text
    assert text.count("nearest image of the same class") == 1
