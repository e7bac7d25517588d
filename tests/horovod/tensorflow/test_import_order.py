"""torch's and TensorFlow's halves in one process, whichever comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.serial

SCRIPT = """
import {first}
import {second}
import torch, tensorflow as tf
import allhands.horovod.tensorflow as tensorflows, allhands.horovod.torch as torchs
torchs.init()
assert tensorflows.is_initialized()
assert float(tensorflows.allreduce(tf.constant(2.0))) == 2
assert float(torchs.allreduce(torch.tensor(3.0))) == 3
torch.nn.functional.conv2d(torch.ones(1, 1, 9, 9), torch.ones(1, 1, 3, 3))
tf.nn.conv2d(tf.ones([1, 9, 9, 1]), tf.ones([3, 3, 1, 1]), 1, "VALID")
tensorflows.shutdown()
print("both")
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("allhands.horovod.tensorflow", "allhands.horovod.torch"),
        ("allhands.horovod.torch", "allhands.horovod.tensorflow.keras"),
    ],
)
def test_either_may_be_imported_first(first: str, second: str) -> None:
    script = SCRIPT.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both"
