"""Importing: TensorFlow before torch, and each module alone. In the workers of the other tests
torch comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.serial

SOURCE = Path(__file__).parents[3] / "src"
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

import importlib, sys
for name in sys.argv[1:]:
    for old in [m for m in sys.modules if m.partition(".")[0] == "allhands"]:
        del sys.modules[old]
    importlib.import_module(name)
print("alone")
"""


def test_tensorflow_may_come_before_torch_and_every_module_alone() -> None:
    names = sorted(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("tensorflow", "keras")
        for path in (SOURCE / "allhands" / "horovod" / folder).rglob("*.py")
    )
    assert len(names) > 10
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["both", "alone"]
