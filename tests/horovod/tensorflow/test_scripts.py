"""Scripts written for Horovod and Keras 2 run unchanged through `allhands launch --horovod`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.examples.running import run_in

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]

SCRIPTS = Path(__file__).parents[1] / "scripts"


def launched(folder: Path, workers: int, script: str, *words: str) -> str:
    """What the script says, of all ranks."""
    command = "from allhands.cli.main import main; main()"
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    line = ["launch", "--horovod", "-np", str(workers), "-H", f"localhost:{workers}"]
    return run_in(
        folder,
        sys.executable,
        "-c",
        command,
        *line,
        str(SCRIPTS / script),
        *words,
        env=environment,
    )


def of_each_rank(pattern: str, said: str, workers: int) -> list[str]:
    """What follows "rank N: " in a line that matches; all ranks have said one."""
    found = re.findall(rf"\[(\d)\] rank \1(?: of \d)?: {pattern}", said)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(workers)], said
    return [text for _, text in found]


def test_mnist(shared_data: Path, tmp_path: Path) -> None:
    said = launched(tmp_path, 2, "mnist_keras.py", "--data", str(shared_data))
    assert "[0] Epoch 2: finished gradual learning rate warmup to 0.004." in said
    ends = of_each_rank(r"(accuracy [\d.]+, weights [\d.]+)", said, 2)
    assert len(set(ends)) == 1, "both ranks have the same weights and metrics"
    assert float(ends[0].split()[1].rstrip(",")) > 0.6
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{epoch}.h5" for epoch in (1, 2, 3)]


@pytest.mark.parametrize("workers", [2, 3])
def test_words_of_keras_2_give_what_those_of_keras_3_give(tmp_path: Path, workers: int) -> None:
    said = launched(tmp_path, workers, "keras2_words.py")
    assert len(set(of_each_rank(r"(weights [\d.]+)", said, workers))) == 1
    for old, new in (
        ("SGD(lr=...)", "learning_rate="),
        ("SGD(decay=...)", "learning_rate=InverseTimeDecay(learning_rate, 1, 0.25)"),
        ("optimizer.variables()", "optimizer.variables"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("compile(experimental_run_tf_function=...)", "compile without it"),
        ("metric.reset_states", "metric.reset_state"),
    ):
        text = f"FutureWarning: {old} is Keras 2's, and allhands launch --horovod translates it"
        assert said.count(f"{text}: write {new}\n") == workers, old


def test_gradient_tape(shared_data: Path, tmp_path: Path) -> None:
    said = launched(tmp_path, 2, "mnist_tape.py", "--data", str(shared_data))
    ends = of_each_rank(r"(weights [\d.]+, better \w+)", said, 2)
    assert len(set(ends)) == 1
    assert ends[0].endswith("better True")
    assert "optimizer.variables() is Keras 2's" in said
