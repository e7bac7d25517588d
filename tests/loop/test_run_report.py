"""Every training with a logdir leaves one page."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

import allhands
from allhands import SupervisedRunner, UserError
from allhands.loop.times import BEGIN, CHECKPOINTS, DATA, EVALUATION, Times
from allhands.report.curves import curve_pictures
from tests.report import test_curves as problem

TITLES = (
    "Curves",
    "History",
    "Settings",
    "Where the time went",
    "Memory",
    "Membership",
    "Environment",
)


@pytest.fixture(autouse=True)
def _pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_CURVES", "1")


def check(logdir: Path) -> str:
    text = (logdir / "report.html").read_text()
    for title in TITLES:
        assert f"<h2>{title}</h2>" in text
    assert len(text) < 1_000_000
    assert "http" not in text
    for part in (BEGIN, DATA, EVALUATION, CHECKPOINTS):
        assert f"<td>{part}</td>" in text
    return text


def test_a_runner_s_page(tmp_path: Path) -> None:
    model = problem.nn.Linear(2, 2)
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=problem.nn.CrossEntropyLoss(),
        optimizer=problem.torch.optim.SGD(model.parameters(), lr=0.1),
        datasets={"batch_size": 4, "train": problem.data(), "valid": problem.data()},
        metrics=["accuracy"],
        logdir=tmp_path,
        num_epochs=2,
    )
    text = check(tmp_path)
    assert "4 optimizer steps, 2 rows of history" in text
    assert "<td>model</td><td>Linear, 6 parameters</td>" in text
    assert 'aria-label="loss over epoch"' in text
    assert 'aria-label="accuracy over epoch"' in text
    assert "peak memory:" in text
    with (tmp_path / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert f"{float(last['valid_accuracy']):.4f}" in text


def test_an_own_loop_s_page_and_the_members_of_the_world(tmp_path: Path) -> None:
    (tmp_path / "membership.csv").write_text(
        "time,membership,step,workers,lost,joined,seconds\n"
        "1.0,0,,3,,0,0\n5.0,1,7,2,rank 2 of <host>,0,0.25\n"
    )
    loop = problem.loop(tmp_path, resume="auto")
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            loop.step(lambda batch: problem.loss_of(loop, batch), batch)
        epoch.evaluate("valid", lambda batch: problem.loss_of(loop, batch))
    text = check(tmp_path)
    assert "rank 2 of &lt;host&gt;" in text
    assert 'aria-label="workers over time"' in text


def test_an_error_or_the_variable_leaves_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = problem.loop(tmp_path / "error")
    with pytest.raises(UserError, match="on purpose"):
        for epoch in loop.epochs(1):
            for batch in epoch.train:
                loop.step(lambda batch: problem.loss_of(loop, batch), batch)
            raise UserError("on purpose")
    assert not (tmp_path / "error" / "report.html").exists()
    monkeypatch.setenv("ALLHANDS_CURVES", "0")
    loop = problem.loop(tmp_path / "none")
    for epoch in loop.epochs(1):
        for batch in epoch.train:
            loop.step(lambda batch: problem.loss_of(loop, batch), batch)
    assert not (tmp_path / "none" / "report.html").exists()
    assert allhands.current_world() is None


def test_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("allhands.loop.times.time.perf_counter", lambda: now[0])

    def batches():
        for batch in range(3):
            now[0] += 2.0  # to read it
            yield batch

    times = Times()
    now[0] += 5.0
    times.begun()
    for _ in times.reading(batches()):
        now[0] += 1.0  # a step
    for _ in times.over(EVALUATION, batches()):
        now[0] += 1.0
    with times.of(CHECKPOINTS):
        now[0] += 0.5
    assert times.parts("steps") == {
        BEGIN: 5.0,
        DATA: 6.0,
        EVALUATION: 9.0,
        CHECKPOINTS: 0.5,
        "steps": 3.0,
    }


def test_a_page_of_many_long_curves_is_small() -> None:
    rows, drawn = list(range(20_000)), random.Random(1)
    values = [drawn.random() for _ in rows]
    curves = {f"metric {n}": {"train": (rows, values), "valid": (rows, values)} for n in range(14)}
    text = curve_pictures("step", [float(row) for row in rows], curves)
    assert len(text) < 700_000
    assert "Not drawn: metric 12, metric 13; see metrics.csv." in text
