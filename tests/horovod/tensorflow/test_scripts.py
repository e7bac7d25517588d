"""A script written for Horovod and Keras runs unchanged through `allhands launch --horovod`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.examples.running import run_in

pytestmark = pytest.mark.serial

SCRIPT = Path(__file__).parents[1] / "scripts" / "mnist_keras.py"


def test_mnist(shared_data: Path, tmp_path: Path) -> None:
    command = "from allhands.cli.main import main; main()"
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    words = [
        "launch",
        "--horovod",
        "-np",
        "2",
        "-H",
        "localhost:2",
        str(SCRIPT),
        "--data",
        str(shared_data),
    ]
    said = run_in(tmp_path, sys.executable, "-c", command, *words, env=environment)
    assert "[0] Epoch 2: finished gradual learning rate warmup to 0.004." in said
    ends = re.findall(r"\[(\d)\] rank \1 of 2: accuracy ([\d.]+), weights ([\d.]+)", said)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"], said
    assert len({(accuracy, weights) for _, accuracy, weights in ends}) == 1, (
        "both ranks have the same weights and metrics"
    )
    assert float(ends[0][1]) > 0.6
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{epoch}.h5" for epoch in (1, 2, 3)]
