"""What a server asks of a site, read and checked."""

from __future__ import annotations

import traceback
from typing import Any

from flwr.app import ConfigRecord, RecordDict

_ABSENT = object()


class Refusal(Exception):
    """What the server is told instead of an update."""


class SiteRequest:
    """A request, read without believing that anything is there."""

    def __init__(self, request: RecordDict) -> None:
        self.request = request
        found = request.get("allhands")
        if not isinstance(found, ConfigRecord):
            raise Refusal("the message is none of allhands'")
        self.config = found

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.config.get(name, default)
        if value is _ABSENT:
            raise Refusal(f"the message has no '{name}'")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise Refusal(f"the message's '{name}' is no text")
        return value

    def number(self, name: str, default: Any = _ABSENT) -> Any:
        """A whole number, or `default` where there is none."""
        value = self.get(name, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool)):
            raise Refusal(f"the message's '{name}' is no whole number")
        return value

    def arrays(self, name: str) -> Any:
        """A record of arrays."""
        found = self.request.array_records.get(name)
        if found is None:
            raise Refusal(f"the message has no arrays '{name}'")
        return found


def last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:500]
