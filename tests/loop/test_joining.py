"""Which errors tell that a worker is lost."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

import pytest

from allhands.errors import UserError, WorldError
from allhands.loop.joining import is_loss
from allhands.world.membership import SupersededError


class Memberships:
    """A newer membership that tells of a loss, or of one that joins alone."""

    def __init__(self, lost: bool, aborted: bool = False) -> None:
        self.aborted = aborted
        self.has_lost = lambda: lost
        self.changed = lambda: True


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo] Connection closed by peer"),
        WorldError("the process group was aborted, as a worker is lost"),
        SupersededError("the members of the world have changed again"),
    ],
)
def test_errors_of_the_group_are(error: Exception) -> None:
    regrouping: Any = Memberships(False)
    assert is_loss(error, regrouping)


def test_an_error_of_the_users_is_not_while_a_worker_waits_to_join() -> None:
    # It would be repeated in another world, and those that join come in between two steps alone.
    error = RuntimeError("shape '[2, 3]' is invalid for input of size 5")
    joins: Any = Memberships(False)
    loses: Any = Memberships(True)
    assert not is_loss(error, joins)
    assert is_loss(error, loses), "of what the loss has left half done"
    assert not is_loss(UserError("no"), loses)


def test_any_error_is_once_the_group_is_aborted() -> None:
    """What nccl gives then is not what was sent."""
    aborted: Any = Memberships(True, aborted=True)
    assert is_loss(UserError("the loss is nan on rank 1"), aborted)
    assert is_loss(UnpicklingError("Unsupported operand 5"), aborted)
    assert not is_loss(SystemExit(0), aborted)
