"""The end of a training by the clock."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

from allhands.checks import is_number
from allhands.errors import UserError
from allhands.runner.callbacks import Callback

if TYPE_CHECKING:
    from allhands.runner.training import Training


class StopAfter(Callback):
    """End the training once some time has passed, after the same optimizer step on every rank.

    With a logdir a checkpoint is saved, from which ``resume="auto"`` goes on; the time begins anew
    then. The unfinished epoch is not in the history. Rank 0's clock decides, and the ranks ask it
    about four times a second.

    Args:
        hours, minutes, seconds: the time from the beginning of the training, added up; or the first
            as a `datetime.timedelta`.

    Raises:
        UserError: the time is not above 0.
    """

    def __init__(
        self, hours: float | timedelta = 0, *, minutes: float = 0, seconds: float = 0
    ) -> None:
        if isinstance(hours, timedelta):
            hours = hours.total_seconds() / 3600
        if not all(is_number(value) for value in (hours, minutes, seconds)):
            raise UserError(
                "StopAfter: write StopAfter(hours=11.5), StopAfter(minutes=30) or a timedelta"
            )
        self.seconds = 3600.0 * hours + 60.0 * minutes + seconds
        if not 0 < self.seconds < math.inf:
            raise UserError(
                f"StopAfter: {self.seconds:g} s; the time must be above 0, as StopAfter(hours=11.5)"
            )

    def on_train_start(self, training: Training) -> None:
        training.loop.stop_after(self.seconds)
