"""What calls of Horovod that must fail are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import allhands.horovod.torch as hvd


def refused(call: Callable[[], Any], kind: type[Exception] = hvd.HorovodInternalError) -> str:
    """What the error of this kind says that the call ends with."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was refused"
