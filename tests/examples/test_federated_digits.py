"""The federated run file: it learns, and one worker gives the numbers of two."""

from __future__ import annotations

import csv

import pytest

from tests.examples.running import EXAMPLES, program, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def rows(logdir) -> list[dict[str, str]]:
    with (logdir / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "seconds"}
            for row in csv.DictReader(file)
        ]


def run(tmp_path, *overrides: str) -> str:
    path = str(EXAMPLES / "federated_digits" / "run.yml")
    return run_in(tmp_path, program("allhands"), "run", "-C", path, "device=cpu", *overrides)


def test_clients_learn_to_read_digits(tmp_path):
    text = run(tmp_path)
    assert "fedprox, 2 workers on cpu; 10 of 100 clients a round, 50 rounds" in text
    last = rows(tmp_path / "logs" / "federated_digits")[-1]
    assert float(last["valid_accuracy"]) >= 0.85, text


# rare: federated/test_processes.py compares one worker with several.
@pytest.mark.rare
def test_one_worker_gives_the_numbers_of_two(tmp_path):
    for workers in (1, 2):
        run(tmp_path, f"workers={workers}", "strategy.rounds=10", f"logdir=on_{workers}")
    one, two = rows(tmp_path / "on_1"), rows(tmp_path / "on_2")
    # Workers have a thread each where one has all cores, so that sums within an operation differ by
    # rounding.
    for alone, shared in zip(one, two, strict=True):
        for name, value in alone.items():
            assert (float(value) if value else None) == (
                pytest.approx(float(shared[name]), rel=1e-4) if shared[name] else None
            ), name
