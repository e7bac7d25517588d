"""A run file, its data function, and a folder of data for each of three sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NAMES, SIZES, TESTS = ("north", "east", "south"), (10, 26, 18), (4, 0, 7)
RUN = """
data: {name: "own.py:load", batch_size: 4}
model: {name: mlp, in_features: 6, hidden: [9], out_features: 3}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
strategy:
  name: federated
  rounds: 2
  local_epochs: 2
  local_layers: ["layers.0.bias"]
  sites: {names: [north, east, south], wait: 5}
workers: 1
device: cpu
logdir: logs
"""
OWN = """
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset


def load(root=None):
    if root is None:
        return {}
    with np.load(Path(root, "own.npz"), allow_pickle=False) as file:
        rows = {name: torch.from_numpy(file[name]) for name in file}
    made = {"train": TensorDataset(rows["x"], rows["y"])}
    if len(rows["u"]):
        made["valid"] = TensorDataset(rows["u"], rows["v"])
    return made
"""


def write(folder: Path, columns: dict[str, int] | None = None) -> None:
    """All files; `columns`: of sites that have another number of them."""
    (folder / "run.yml").write_text(RUN)
    (folder / "own.py").write_text(OWN)
    random = np.random.default_rng(1)
    for name, size, tests in zip(NAMES, SIZES, TESTS, strict=True):
        width = (columns or {}).get(name, 6)
        x = random.standard_normal((size + tests, width), dtype=np.float32)
        y = (x.sum(1) > 0).astype(np.int64) + (x[:, 0] > 0.5)
        (folder / "data" / name).mkdir(parents=True)
        parts = {"x": x[:size], "y": y[:size], "u": x[size:], "v": y[size:]}
        np.savez(folder / "data" / name / "own.npz", **parts)
