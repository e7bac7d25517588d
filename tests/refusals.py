"""What calls that must fail are told, in workers and in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allhands.errors import UserError


def refused(call: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    """What the error of this kind says that the call ends with; "" when it ends with none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""
