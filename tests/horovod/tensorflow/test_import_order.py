"""torch's and TensorFlow's halves in one process, TensorFlow's first. In the workers of the other tests torch comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.serial

SCRIPT = """
import tensorflow as tf
import allhands.horovod.tensorflow as tensorflows
import torch
import allhands.horovod.torch as torchs
torchs.init()
assert tensorflows.is_initialized()
assert float(tensorflows.allreduce(tf.constant(2.0))) == 2
assert float(torchs.allreduce(torch.tensor(3.0))) == 3
torch.nn.functional.conv2d(torch.ones(1, 1, 9, 9), torch.ones(1, 1, 3, 3))
tf.nn.conv2d(tf.ones([1, 9, 9, 1]), tf.ones([3, 3, 1, 1]), 1, "VALID")
tensorflows.shutdown()
print("both")
"""


def test_tensorflow_may_be_imported_before_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both"
