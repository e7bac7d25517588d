"""Compares the calls with the modules that there are."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tests.horovod.api.calls import MODULES, Call


def problems(module: str) -> list[str]:
    """What of a module of Horovod's is not as its calls say."""
    ours: Any = importlib.import_module(module.replace("horovod", "allhands.horovod", 1))
    return [text for call in MODULES[module] if (text := _problem(ours, call))]


def _problem(ours: Any, call: Call) -> str:
    found = ours
    for part in call.name.split("."):
        if not hasattr(found, part):
            return f"{call.name} is not there"
        found = getattr(found, part)
    if not call.parameters:
        return ""
    parameters = inspect.signature(found).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    names = {parameter.name for parameter in parameters}
    missing = [name for name in call.parameters if name not in names]
    return f"{call.name} does not take {', '.join(missing)}" if missing else ""
