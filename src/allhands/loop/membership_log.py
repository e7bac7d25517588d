"""What a user sees of the changes of a world's members."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.report import Change, draw_membership
from allhands.world.regroup import Membership

if TYPE_CHECKING:
    from allhands.loop.lifecycle import Lifecycle

CSV = "membership.csv"
_COLUMNS = ("time", "membership", "step", "workers", "lost", "joined", "seconds")


class MembershipLog:
    """Prints a line for each change, and writes a row of ``membership.csv`` into the logdir. The
    first row of a job is that of its beginning, as membership 0.
    """

    def __init__(self, loop: Lifecycle) -> None:
        self._loop = loop
        self._began, self._began_with = time.time(), loop.world.world_size

    def add(self, membership: Membership, seconds: float, repeats: bool, forgone: str = "") -> None:
        """The members have changed.

        Args:
            membership: the new one.
            seconds: that it took.
            repeats: something was interrupted, and is done again.
            forgone: what is lost for good, as the end of a sentence.
        """
        loop, size = self._loop, self._loop.world.world_size
        lost, joined = "; ".join(membership.lost), len(membership.joined)
        what = [f"lost {lost}"] if lost else []
        what += [f"{joined} worker{'s' if joined > 1 else ''} joined"] if joined else []
        workers = f"{size} worker{'s' if size > 1 else ''}"
        each = "s" if size == 1 else ""
        goes = f"repeat{each} what was interrupted" if repeats else f"go{'es' if each else ''} on"
        loop.reporter.line(
            f"membership {membership.epoch}: {', '.join(what)}; {workers} {goes} after "
            f"{loop.counted} {loop.global_step} ({seconds:.2f} s){forgone}"
        )
        logdir = loop.settings.logdir
        if loop.world.rank or logdir is None:
            return
        path = logdir / CSV
        rows: list[tuple[Any, ...]] = [] if path.exists() else [_COLUMNS]
        # A rank that is the first since a change goes on with what others have written.
        # The file has milliseconds.
        if not any(float(row["time"]) >= round(self._began, 3) for row in read_rows(path)):
            rows.append((f"{self._began:.3f}", 0, "", self._began_with, "", 0, 0))
        now, took = f"{time.time():.3f}", f"{seconds:.3f}"
        rows.append((now, membership.epoch, loop.global_step, size, lost, joined, took))
        with path.open("a", newline="") as file:
            csv.writer(file).writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a ``membership.csv``; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(path: Path) -> None:
    """Draw a ``membership.csv``, if there is one, until now; as ``membership.png`` beside it."""
    changes = changes_in(path)
    if changes:
        draw_membership(path.with_suffix(".png"), changes, time.time())


def changes_in(path: Path) -> list[Change]:
    """What a ``membership.csv`` tells; nothing where there is no such file."""
    return [
        Change(
            float(row["time"]), int(row["workers"]), int(row["joined"]), row["membership"] == "0"
        )
        for row in read_rows(path)
    ]
