"""What a user sees of the changes of a world's members."""

from __future__ import annotations

import csv
import time
from typing import TYPE_CHECKING

from allhands.world.regroup import Membership

if TYPE_CHECKING:
    from allhands.loop.bound_loop import BoundLoop

_COLUMNS = ("time", "membership", "step", "workers", "lost", "joined", "seconds")


class MembershipLog:
    """Prints a line for each change, and writes a row of ``membership.csv`` into the logdir.

    Args:
        loop: the training.
    """

    def __init__(self, loop: BoundLoop) -> None:
        self._loop = loop
        self._began = time.monotonic()

    def add(self, membership: Membership, seconds: float, repeats: bool) -> None:
        """The members have changed, which took so many seconds; `repeats`: something was
        interrupted, and is done again."""
        loop, size = self._loop, self._loop.world.world_size
        lost, joined = "; ".join(membership.lost), len(membership.joined)
        what = [f"lost {lost}"] if lost else []
        what += [f"{joined} worker{'s' if joined > 1 else ''} joined"] if joined else []
        workers = f"{size} worker{'s' if size > 1 else ''}"
        goes = "repeat what was interrupted" if repeats else "go on"
        loop.reporter.line(
            f"membership {membership.epoch}: {', '.join(what)}; {workers} {goes} after optimizer "
            f"step {loop.global_step} ({seconds:.2f} s)"
        )
        logdir = loop.settings.logdir
        if loop.world.rank or logdir is None:
            return
        path = logdir / "membership.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(_COLUMNS)
            row = (
                f"{time.time():.3f}",
                membership.epoch,
                loop.global_step,
                size,
                lost,
                joined,
                f"{seconds:.3f}",
            )
            writer.writerow(row)
