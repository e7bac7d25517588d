"""Importing: each module alone, and TensorFlow before torch. In the workers of the other tests torch comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


SOURCE = Path(__file__).parents[3] / "src"


def test_every_module_can_be_imported_alone() -> None:
    names = sorted(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("tensorflow", "keras")
        for path in (SOURCE / "allhands" / "horovod" / folder).rglob("*.py")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    for old in [m for m in sys.modules if m.partition('.')[0] == 'allhands']: del sys.modules[old]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert len(names) > 10
    assert done.returncode == 0, done.stderr


def test_tensorflow_may_be_imported_before_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both"
