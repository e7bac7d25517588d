"""examples/horovod_cifar100 on two workers: the guide's lines, and a checkpoint that rank 0 alone
has written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.running import EXAMPLES, run_in

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    """Files of the size that the publisher's have. Noise will do: what is tested is that the script
    trains."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in (("train", 50_000), ("test", 10_000)):
        records = random.integers(0, 256, (count, 3074), np.uint8)
        records[:, 0] %= 20
        records[:, 1] %= 100
        records.tofile(folder / f"{name}.bin")
    return tmp_path


def test_the_guides_script_trains_on_two_workers(cifar100: Path) -> None:
    folder = cifar100 / "run"
    folder.mkdir()
    command = "import sys; from allhands.cli.main import main; sys.exit(main())"
    script = str(EXAMPLES / "horovod_cifar100" / "train.py")
    environment = {
        "ALLHANDS_DATA": str(cifar100),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    said = run_in(
        folder, sys.executable, "-c", command, "launch", "-n", "2", script, "24", env=environment
    )
    lines = re.findall(r"^\[(\d)\] Step #(\d+)\tLoss: (\d+\.\d{6})$", said, flags=re.MULTILINE)
    assert [(rank, step) for rank, step, _ in lines] == [("0", "0"), ("0", "10")]
    assert all(abs(float(loss) - np.log(100)) < 0.2 for _, _, loss in lines)
    assert sorted(os.listdir(folder)) == [
        "checkpoint",
        "checkpoints-1.data-00000-of-00001",
        "checkpoints-1.index",
    ]
