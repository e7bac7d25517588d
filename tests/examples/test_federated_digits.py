"""The federated run file: it learns, and one worker gives the numbers of two."""

from __future__ import annotations

import csv

import pytest

from tests.examples.running import EXAMPLES, program, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial]


def rows(logdir) -> list[dict[str, str]]:
    with (logdir / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "seconds"}
            for row in csv.DictReader(file)
        ]


def test_clients_learn_to_read_digits_and_one_worker_gives_the_numbers_of_two(tmp_path):
    path = str(EXAMPLES / "federated_digits" / "run.yml")
    text = run_in(tmp_path, program("allhands"), "run", "-C", path, "device=cpu")
    assert "fedprox, 2 workers on cpu; 10 of 100 clients a round, 50 rounds" in text
    two = rows(tmp_path / "logs" / "federated_digits")
    assert float(two[-1]["valid_accuracy"]) >= 0.85, text
    run_in(
        tmp_path,
        program("allhands"),
        "run",
        "-C",
        path,
        "device=cpu",
        "workers=1",
        "strategy.rounds=10",
        "logdir=one",
    )
    one = rows(tmp_path / "one")
    # Workers have a thread each where one has all cores, so that sums within an operation differ by
    # rounding.
    for alone, shared in zip(one, two[:10], strict=True):
        for name, value in alone.items():
            assert (float(value) if value else None) == (
                pytest.approx(float(shared[name]), rel=1e-4) if shared[name] else None
            ), name
