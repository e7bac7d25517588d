"""Where numbers go besides the console: TensorBoard and CSV files under the logdir."""

from __future__ import annotations

import csv
import io
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write_text
from allhands.errors import UserError
from allhands.loop import membership_log
from allhands.loop.reporter import Reporter
from allhands.loop.settings import LoopSettings
from allhands.loop.trackers import Trackers
from allhands.report import draw_curves, has_matplotlib
from allhands.report.curves import Curve, over
from allhands.world import World
from allhands.world.regroup import began_with

VARIABLE = "ALLHANDS_CURVES"


class Loggers:
    """Writes ``metrics.csv`` (one row an epoch, or an evaluation), ``tensorboard/``, and at the end
    ``curves.png`` where matplotlib is installed, with ``membership.png`` where members of the world
    have changed; on ranks other than 0, or without logdir, nothing.

    The variable ``ALLHANDS_CURVES=0`` leaves the pictures, and ``report.html``, out.

    Args:
        logdir: folder, or None.
        resumed_rows: rows already in the history; an older ``metrics.csv`` is cut back to them.
        resumed_step: the optimizer step that the training goes on after; TensorBoard hides what was
            logged beyond it.
        unit: what a row is of: "epoch", "round" or "step".
        trackers: what else takes the numbers.
    """

    def __init__(
        self,
        logdir: Path | None,
        resumed_rows: int = 0,
        resumed_step: int | None = None,
        unit: str = "epoch",
        trackers: Trackers | None = None,
    ) -> None:
        self._unit = unit
        self._trackers = Trackers() if trackers is None else trackers
        self._trackers.open(logdir, resumed_step is not None)
        self._parts: dict[str, tuple[str, str]] = {}  # of a column: its loader and metric
        self._writer: Any = None
        self._csv: Path | None = None
        #: Of ``metrics.csv``.
        self.rows: list[dict[str, str]] = []
        if logdir is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(logdir / "tensorboard"),
            purge_step=None if resumed_step is None else resumed_step + 1,
        )
        self._csv = logdir / "metrics.csv"
        self.rows = self._read_rows(resumed_rows)

    def _read_rows(self, limit: int) -> list[dict[str, str]]:
        assert self._csv is not None
        if not limit or not self._csv.exists():
            return []
        with self._csv.open(newline="") as file:
            return list(csv.DictReader(file))[:limit]

    @property
    def active(self) -> bool:
        """Whether anything is written."""
        return self._writer is not None or bool(self._trackers)

    def step(self, step: int, loss: float, rates: list[float]) -> None:
        """This rank's running training loss and the learning rate, after `step` optimizer steps."""
        if self._writer is not None:
            self._writer.add_scalar("step/train_loss", loss, step)
            self._writer.add_scalar("step/lr", rates[0], step)
        self._trackers.call("log", {"step/train_loss": loss, "step/lr": rates[0]}, step)

    def epoch(
        self,
        epoch: int,
        step: int,
        values: Mapping[str, Mapping[str, float]],
        rates: list[float],
        seconds: float,
        at: int | None = None,
    ) -> None:
        """Every loader's metrics, over the whole epoch or since the last evaluation; `at` is their
        place in TensorBoard, if not `epoch`."""
        numbers = {f"{loader}/{key}": v for loader, one in values.items() for key, v in one.items()}
        self._trackers.call("log", {**numbers, "lr": rates[0], "epoch": epoch}, step)
        if self._writer is None or self._csv is None:
            return
        at = epoch if at is None else at
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, at)
        self._writer.add_scalar("lr", rates[0], at)
        self._writer.flush()
        row = {"epoch": epoch, "step": step, "lr": rates[0], "seconds": round(seconds, 3)}
        for loader, metrics in values.items():
            for name, value in metrics.items():
                row[f"{loader}_{name}"] = value
                self._parts[f"{loader}_{name}"] = loader, name
        self.rows.append({key: str(value) for key, value in row.items()})
        text = io.StringIO()
        columns = list(dict.fromkeys(key for line in self.rows for key in line))
        writer = csv.DictWriter(text, columns, restval="")
        writer.writeheader()
        writer.writerows(self.rows)
        atomic_write_text(self._csv, text.getvalue())

    def close(self) -> None:
        """Flush and close the files. Without an error on its way, draw the curves."""
        self._close_files()
        curves = None if self._csv is None else self._csv.with_name("curves.png")
        if curves is not None and curves.is_file():
            self._trackers.call("picture", "curves", curves)
        self._trackers.call("close", sys.exc_info()[0] not in (None, SystemExit))

    def _close_files(self) -> None:
        if self._writer is not None:
            self._writer.close()
            if sys.exc_info()[0] in (None, SystemExit) and wanted() and has_matplotlib():
                label, at, curves = self.measured()
                if curves and self._csv is not None:
                    draw_curves(self._csv.with_name("curves.png"), {label: at}, curves)
                if self._csv is not None and began_with() is not None:
                    membership_log.draw(self._csv.with_name(membership_log.CSV))

    def measured(self) -> tuple[str, list[float], dict[str, dict[str, Curve]]]:
        """What curves are drawn over, its name first, and the curves by metric and loader."""
        curves: dict[str, dict[str, Curve]] = {}
        for column, (loader, name) in self._parts.items():
            measured = [number for number, row in enumerate(self.rows) if row.get(column)]
            values = [float(self.rows[number][column]) for number in measured]
            curves.setdefault(name, {})[loader] = measured, values
        at = [float(row["epoch"]) for row in self.rows]
        label, at = over(self._unit, at, [float(row["step"]) for row in self.rows])
        return label, at, curves


def loggers_of(
    settings: LoopSettings,
    world: World,
    reporter: Reporter,
    before: Loggers | None,
    rows: int,
    step: int | None,
    unit: str = "epoch",
) -> Loggers:
    """The loggers of a training, new ones where there are none `before`, or where this rank has
    become the first; see `Loggers` for the others."""
    first = world.rank == 0
    if before is not None and (before.active or not first):
        return before
    trackers = settings.trackers(world, reporter.line)
    return Loggers(settings.logdir if first else None, rows, step, unit, trackers)


def wanted() -> bool:
    """Whether pictures and pages are to be made."""
    return os.environ.get(VARIABLE) != "0"


def prepare_logdir(logdir: Any) -> Path | None:
    """The logdir as a folder that can be written to, or None."""
    if logdir is None:
        return None
    path = Path(logdir).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x")
    except OSError as error:
        raise UserError(
            f"logdir={str(logdir)!r} cannot be written: {error.strerror or error} "
            f"({error.filename or path}). Choose another folder, or logdir=None to write nothing"
        ) from None
    return path


def set_earlier_run_aside(logdir: Path) -> Path | None:
    """Move the files of an earlier run in this logdir into a folder ``earlier-N`` inside it, so
    that none is overwritten."""
    kept = ("checkpoints", "tensorboard", "metrics.csv", "run.yml", membership_log.CSV)
    ours = (
        *kept,
        "wandb_run.json",
        "mlflow_run.json",
        "curves.png",
        "membership.png",
        "report.html",
    )
    found = [logdir / name for name in ours if (logdir / name).exists()]
    if not found:
        return None
    number = 1
    while (logdir / f"earlier-{number}").exists():
        number += 1
    target = logdir / f"earlier-{number}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    return target
