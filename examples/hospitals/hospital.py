"""What a hospital does with its own patients' file: the function that run.yml names."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

# Age, sex, chest pain, blood pressure, cholesterol, sugar, ECG, highest pulse, angina, ST
# depression, its slope, vessels, thal: what is usual and how far people differ, in round numbers.
# All hospitals use the same; none has to tell what its patients are.
USUAL = np.array([55, 0.5, 3, 130, 240, 0.2, 0.5, 140, 0.5, 1, 2, 1, 5], dtype=np.float32)
DIFFER = np.array([10, 0.5, 1, 20, 50, 0.4, 0.8, 25, 0.5, 1, 0.6, 1, 2], dtype=np.float32)
CHOLESTEROL = 4


def load(root: str | None = None) -> dict[str, TensorDataset]:
    """The patients of the hospital whose file lies in `root`: 26 columns, the latter 13 of them 1
    where the former are not known, and whether a vessel is narrowed."""
    if root is None:  # the server has no patients
        return {}
    with np.load(Path(root, "patients.npz"), allow_pickle=False) as file:
        x, x_test, y, y_test = (file[name] for name in ("x", "x_test", "y", "y_test"))
    return {"train": patients(x, y), "valid": patients(x_test, y_test)}


def patients(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    """Rows N x 13 (NaN: not known) as a data set of rows N x 26 and labels."""
    # Nobody has none.
    x = np.where(x[:, [CHOLESTEROL]] == 0, np.where(np.arange(13) == CHOLESTEROL, np.nan, x), x)
    unknown = np.isnan(x)
    columns = np.concatenate([np.where(unknown, 0, (x - USUAL) / DIFFER), unknown], axis=1)
    return TensorDataset(torch.from_numpy(columns.astype(np.float32)), torch.from_numpy(y))
