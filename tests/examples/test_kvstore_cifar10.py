"""The Gluon tutorial's script without servers; tests/cluster/test_kvstore.py runs it on two hosts
with two of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, program, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def test_two_workers_print_their_accuracy_after_each_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    # Noise will do: what is tested is that the script runs. The label is a record's first byte.
    records = b"".join(bytes([number % 10]) + os.urandom(3072) for number in range(10_000))
    for name in ("data_batch_1", "test_batch"):
        (folder / f"{name}.bin").write_bytes(records)
    for number in range(2, 6):
        (folder / f"data_batch_{number}.bin").symlink_to("data_batch_1.bin")
    script = str(EXAMPLES / "kvstore_cifar10" / "cifar10_dist.py")
    options = ["--samples", "9", "--test-samples", "10", "--batch-size", "4", "--epochs", "2"]
    said = run_in(
        tmp_path,
        program("allhands"),
        "launch",
        "-n",
        "2",
        script,
        *options,
        env={"ALLHANDS_DATA": str(tmp_path)},
    )
    for rank in range(2):
        assert f"[{rank}] Total number of workers: 2\n" in said
        assert f"[{rank}] This worker's rank: {rank}\n" in said
        accuracies = re.findall(
            rf"^\[{rank}\] Epoch (\d+): Test_acc (0\.\d00000|1\.000000)$", said, re.MULTILINE
        )
        assert [epoch for epoch, _ in accuracies] == ["0", "1"], said
