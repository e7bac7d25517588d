"""Variables of this process's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables; one without a value is removed."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Within, variables are set so; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)
