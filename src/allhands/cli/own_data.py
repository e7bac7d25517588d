"""Data of one's own in a run file: a function that `data.name` names makes the data sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.cli.own_objects import find
from allhands.errors import UserError, kind_of


def options_of(name: str, root: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with: ``data.root`` as `root`, where it takes that, and
    ``data.options``.
    """
    if root is not None and not Path(root).exists():
        raise UserError(
            f"data.root: there is no file or folder {root}; write where the data are, or make the "
            "folder where the function gets them itself"
        )
    takes = inspect.signature(find(name)).parameters
    anything = any(option.kind is option.VAR_KEYWORD for option in takes.values())
    given = dict(options)
    if "root" in given:
        raise UserError("data.options has a root; write data.root")
    if "root" in takes or anything:
        given["root"] = root
    elif root is not None:
        raise UserError(
            "data.root is set, and the function takes no root; give it that argument, or set "
            "data.root to null"
        )
    unknown = [] if anything else [key for key in given if key not in takes]
    if unknown:
        raise UserError(
            f"the function takes no {', '.join(unknown)}; it takes {', '.join(takes) or 'nothing'}"
        )
    missing = [
        key
        for key, option in takes.items()
        if option.default is option.empty
        and key not in given
        and option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)
    ]
    if missing:
        raise UserError(
            f"the function needs {', '.join(missing)}; write data.options.{missing[0]}: …"
        )
    return given


def load(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The data sets by loader. Raises `UserError` when the function returns anything else."""
    made = find(name)(**options)
    if not isinstance(made, Mapping) or not made:
        raise UserError(
            f"{name} returned {kind_of(made)}; it must return data sets by name, such as "
            "{'train': dataset, 'valid': dataset}"
        )
    return dict(made)
