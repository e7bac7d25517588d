"""Horovod's errors."""

from __future__ import annotations

from allhands.errors import AllhandsError, UserError


class HorovodInternalError(AllhandsError, RuntimeError):
    """A collective operation failed: the ranks asked for different things, one of them did not
    come, or one is gone."""


class CallOrderError(UserError, AssertionError):
    """A call that is wrong where it stands between ``backward()`` and ``step()``. An
    AssertionError, as in Horovod."""


class HostsUpdatedInterrupt(AllhandsError, RuntimeError):
    """The hosts of the job changed. `skip_sync`: hosts were only taken away, so that all states are
    still equal."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job changed")
        self.skip_sync = skip_sync


class NotInitializedError(UserError):
    """Something was asked before ``hvd.init()``. A ValueError, as in Horovod."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init() first")
