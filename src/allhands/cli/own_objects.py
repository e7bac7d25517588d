"""Classes and functions of the user's that a run file names: ``package.module:name``,
``folder/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from allhands.errors import UserError, did_you_mean

Made = Callable[..., Any]
# Modules that were imported from files here.
_files: set[str] = set()


def is_own(name: str) -> bool:
    """Whether it is ``package.module:name`` or ``file.py:name``, and no name of this package's."""
    return ":" in name


def find(name: str, what: str = "function") -> Made:
    """The class or function that ``package.module:name`` or ``file.py:name`` names; a file is
    looked for from the working folder.

    Args:
        name: as it is written in a run file.
        what: is looked for: "function", or "class or function".

    Raises:
        UserError: there is no such module, file or name.
    """
    place, _, wanted = name.rpartition(":")
    module = _of_file(Path(place).expanduser()) if place.endswith(".py") else _import(place)
    found = getattr(module, wanted, None)
    if not callable(found):
        known = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or (what != "function" and inspect.isclass(value)))
            and value.__module__ == module.__name__
        ]
        hint = did_you_mean(wanted, known, "")
        raise UserError(
            f"{place} has no {what} '{wanted}'; it has {', '.join(known) or 'none'}{hint}"
        )
    made: Made = found
    return made


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no module '{error.name}'; install it, name a file "
            "(folder/data.py:function), or set PYTHONPATH"
        ) from None
    except ValueError:
        raise UserError("write package.module:function or file.py:function") from None


def _of_file(given: Path) -> ModuleType:
    """The module in a file. It has the name that it would have beside a script, by which workers
    import it too, and so do files in its folder."""
    path = given.absolute()
    if not path.is_file():
        near = did_you_mean(path.name, [one.name for one in path.parent.glob("*.py")], "")
        folder = "" if near or given.is_absolute() else "; it is looked for from the working folder"
        raise UserError(f"there is no file {path}{near}{folder}")
    name, folder = path.stem, str(path.parent)
    there = sys.modules.get(name)
    if there is not None and _is_file(there, path):
        return there
    if there is not None and name in _files:  # of an earlier run in this process
        del sys.modules[name]
    elif there is not None or name in sys.stdlib_module_names or not name.isidentifier():
        why = f"a module '{name}' is there already"
        if not name.isidentifier():
            why = f"'{name}' is no name of a module"
        raise UserError(f"{given} cannot be imported: {why}; give the file another name")
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    _files.add(name)
    return importlib.import_module(name)


def check_together(names: Iterable[str]) -> None:
    """Raise `UserError` where two files of one run would be the same module."""
    files: dict[str, Path] = {}
    for name in names:
        place = name.rpartition(":")[0]
        path = Path(place).expanduser().absolute()
        if place.endswith(".py") and files.setdefault(path.stem, path) != path:
            raise UserError(
                f"{files[path.stem]} and {path} would both be the module '{path.stem}'; give one "
                "of the files another name"
            )


def _is_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).resolve() == path.resolve()
