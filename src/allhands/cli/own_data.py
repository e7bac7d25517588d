"""Data of one's own in a run file: a function that `data.name` names makes the data sets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allhands.errors import UserError, kind_of

Made = Callable[..., Any]


def is_function(name: str) -> bool:
    """Whether `data.name` is ``package.module:function`` or ``file.py:function``, and no set of the
    catalogue."""
    return ":" in name


def function(name: str) -> Made:
    """The function that ``package.module:function`` or ``file.py:function`` names; a file is looked
    for from the working folder.

    Raises:
        UserError: there is no such module, file or function.
    """
    place, _, wanted = name.rpartition(":")
    module = (
        _of_file(Path(place).expanduser().absolute()) if place.endswith(".py") else _import(place)
    )
    found = getattr(module, wanted, None)
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise UserError(f"{place} has no function '{wanted}'; it has {', '.join(known) or 'none'}")
    made: Made = found
    return made


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no module '{error.name}'; install it, name a file "
            "(folder/data.py:function), or set PYTHONPATH"
        ) from None
    except ValueError:
        raise UserError("write package.module:function or file.py:function") from None


def _of_file(path: Path) -> Any:
    name = f"allhands_data_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # the same in every process
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def options_of(name: str, root: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with: ``data.root`` as `root`, where it takes that, and
    ``data.options``.

    Raises:
        UserError: it does not take an option, or needs one that is not there.
    """
    takes = inspect.signature(function(name)).parameters
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
    made = function(name)(**options)
    if not isinstance(made, Mapping) or not made:
        raise UserError(
            f"{name} returned {kind_of(made)}; it must return data sets by name, such as "
            "{'train': dataset, 'valid': dataset}"
        )
    return dict(made)
