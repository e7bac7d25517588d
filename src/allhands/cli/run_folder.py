"""What lies in the logdir of a run: its run file, its history, what it was measured with."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from allhands.config import RunFile, read_run
from allhands.errors import UserError

METRICS, RUN_FILE = "metrics.csv", "run.yml"
#: Columns of ``metrics.csv`` that are no measurements.
PLACES = ("epoch", "step", "lr", "seconds")


@dataclass(frozen=True)
class RunFolder:
    """A logdir.

    Attributes:
        path: the folder.
        rows: of ``metrics.csv``: columns by name, one value a row; NaN where there is none.
    """

    path: Path
    rows: dict[str, list[float]]

    @property
    def measured(self) -> list[str]:
        """The columns that are measurements, such as ``valid_loss``."""
        return [name for name in self.rows if name not in PLACES]

    def run_file(self, overrides: list[str] | None = None) -> RunFile | None:
        """The stored run file, with changes; None where a script has trained."""
        path = self.path / RUN_FILE
        return read_run([path], overrides or ()) if path.exists() else None

    def main_metric(self) -> tuple[str, bool]:
        """The column that decides which row is best, and whether smaller is better."""
        file = self.run_file()
        loader, metric, smaller = "valid", "loss", True
        if file is not None:
            given = file.config
            loader, metric = given.valid_loader or "valid", given.main_metric
            smaller = metric == "loss" if given.minimize_metric is None else given.minimize_metric
        for name in (f"{loader}_{metric}", f"train_{metric}", *self.measured):
            if name in self.rows:
                return name, smaller
        return "", smaller

    def best(self) -> int | None:
        """The number of the best row; None where nothing decides."""
        name, smaller = self.main_metric()
        known = [(v, n) for n, v in enumerate(self.rows.get(name, [])) if not math.isnan(v)]
        if not known:
            return None
        pick = min if smaller else max
        return pick(known, key=lambda pair: (pair[0], pair[1] if smaller else -pair[1]))[1]


def read_folder(given: Path) -> RunFolder:
    """The logdir that `given` is, or that it lies in."""
    path = given.expanduser()
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / METRICS).is_file():
            return RunFolder(folder, read_rows(folder / METRICS))
    where = path if path.is_dir() else path.parent
    near = (
        sorted(found.parent for found in where.glob(f"*/{METRICS}"))[:5] if where.is_dir() else []
    )
    hint = f"; there are {', '.join(map(str, near))}" if near else ""
    what = "it has no metrics.csv" if path.is_dir() else "there is no such folder"
    raise UserError(f"{given} is no folder of a run: {what}{hint}")


def read_rows(path: Path) -> dict[str, list[float]]:
    """The columns of a ``metrics.csv``."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            rows = [
                {key: float(value) if value else math.nan for key, value in row.items()}
                for row in reader
            ]
        except (ValueError, TypeError, csv.Error) as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}") from None
        return {name: [row[name] for row in rows] for name in reader.fieldnames or ()}


def needed_run_file(folder: RunFolder, overrides: list[str] | None) -> RunFile:
    """The run file, where one is needed."""
    file = folder.run_file(overrides)
    if file is None:
        raise UserError(
            f"{folder.path} has no {RUN_FILE}: a script has trained it, and knows its model; use "
            "SupervisedRunner.evaluate and predict there, or train by allhands run"
        )
    return file
