"""Predictions in files: one row a sample."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allhands.atomic_write import atomic_write
from allhands.errors import UserError, kind_of

ENDINGS = (".csv", ".parquet", ".npz")
_COLUMNS = 10_000  # that a table may have


@dataclass(frozen=True)
class Predictions:
    """What a model has given, in the order of the samples.

    Attributes:
        outputs: by name, arrays whose first dimension is the samples.
        target: the classes or values that were to be met, shape ``[samples]``; None: not known.
        predicted: the class with the largest output, shape ``[samples]``; None: no classes.
    """

    outputs: dict[str, np.ndarray]
    target: np.ndarray | None
    predicted: np.ndarray | None

    @classmethod
    def of(cls, output: Any, target: np.ndarray | None, of_classes: bool) -> Predictions:
        """From the output of `SupervisedRunner.predict`."""
        outputs = dict(_arrays("output", output))
        only = outputs.get("output")
        has_classes = of_classes and only is not None and only.ndim == 2
        return cls(outputs, target, only.argmax(1) if has_classes and only is not None else None)

    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name: ``sample``, ``target``, ``predicted``, and the outputs."""
        samples = len(next(iter(self.outputs.values())))
        found = {"sample": np.arange(samples), "target": self.target, "predicted": self.predicted}
        return {key: value for key, value in found.items() if value is not None} | self.outputs

    def columns(self) -> dict[str, np.ndarray]:
        """As a table: a column for each number that a sample has, ``output_0``, ``output_1``, ….

        Raises:
            UserError: there would be too many.
        """
        found: dict[str, np.ndarray] = {}
        for name, array in self.arrays().items():
            if array.ndim == 1:
                found[name] = array
                continue
            rows = array.reshape(len(array), -1)
            if len(found) + rows.shape[1] > _COLUMNS:
                raise UserError(
                    f"'{name}' has {rows.shape[1]:,} numbers a sample (shape "
                    f"{list(array.shape[1:])}), too many for columns; write -o predictions.npz"
                )
            for place, index in enumerate(np.ndindex(*array.shape[1:])):
                found["_".join([name, *map(str, index)])] = rows[:, place]
        return found


def _arrays(name: str, output: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(output, torch.Tensor):
        floats = output.float() if output.dtype == torch.bfloat16 else output
        yield name, floats.numpy()
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _arrays(key if name == "output" else f"{name}_{key}", value)
    elif isinstance(output, (list, tuple)):
        for place, value in enumerate(output):
            yield from _arrays(f"{name}_{place}", value)
    else:
        raise UserError(f"the output '{name}' is {kind_of(output)}; a file takes tensors")


def check_path(path: Path, force: bool) -> None:
    """Raise `UserError` where predictions cannot be written to `path`."""
    if path.suffix not in ENDINGS:
        raise UserError(
            f"-o {path}: its ending says the format; write {path.stem}.csv, .parquet or .npz"
        )
    if path.exists() and not force:
        raise UserError(f"{path} exists already; choose another name, or add --force to replace it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"-o {path}: there is no folder {path.absolute().parent}")
    if path.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet needs pyarrow, which is not installed; write pip install "
            "'allhands[parquet]', or -o predictions.csv"
        ) from None
    return pyarrow


def write(path: Path, found: Predictions) -> None:
    """Write predictions, whole or not at all; the ending of `path` says the format."""
    with atomic_write(path) as aside:
        if path.suffix == ".npz":
            np.savez(aside, **found.arrays())  # type: ignore[arg-type]
        elif path.suffix == ".parquet":
            pyarrow = _pyarrow()
            pyarrow.parquet.write_table(pyarrow.table(found.columns()), aside)
        else:
            columns = found.columns()
            with aside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(
                    zip(*(column.tolist() for column in columns.values()), strict=True)
                )
