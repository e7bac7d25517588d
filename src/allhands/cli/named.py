"""Objects of classes that a run file names, from the options that stand beside the name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from allhands.config import RunFile, nearest
from allhands.errors import UserError


def make(
    run_file: RunFile,
    section: str,
    known: Mapping[str, Any],
    positional: tuple[Any, ...],
    **filled: Any,
) -> Any:
    """An object of the class that a section names, from the section's options, which are checked
    first."""
    name, kind = choose(run_file, section, known)
    chosen = getattr(run_file.config, section)
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in chosen.options.items()}
    if getattr(chosen, "lr", None) is not None:
        options["lr"] = chosen.lr
    return build(run_file, (section,), name, kind, options, positional, **filled)


def build(
    run_file: RunFile,
    path: tuple[str, ...],
    name: str,
    kind: Any,
    options: Mapping[str, Any],
    positional: tuple[Any, ...] = (),
    **filled: Any,
) -> Any:
    """An object of the class `kind`, from the options that were written at `path`, which are
    checked first."""
    parameters = dict(list(inspect.signature(kind).parameters.items())[len(positional) :])
    for key, value in options.items():
        if key not in parameters:
            raise run_file.error(
                (*path, key), f"{name} has no such option; {nearest(key, parameters)}"
            )
        problem = _mismatch(parameters[key], value)
        if problem:
            raise run_file.error((*path, key), problem)
    options = {**options, **filled}
    missing = [
        key
        for key, p in parameters.items()
        if p.default is p.empty and key not in options and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if missing:
        raise run_file.error(
            path, f"{name} needs {', '.join(missing)}; write {'.'.join(path)}.{missing[0]}: …"
        )
    return located(run_file, path, lambda: kind(*positional, **options))


def choose(run_file: RunFile, section: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The class that a section names, in any spelling of capitals, and that class's own name."""
    wanted = getattr(run_file.config, section).name
    lowered = {name.lower(): name for name in known}
    if wanted.lower() not in lowered:
        raise run_file.error(
            (section, "name"), f"there is no such {section}; {nearest(wanted, known)}"
        )
    name = lowered[wanted.lower()]
    return name, known[name]


def is_kind(value: Any, bases: Any) -> bool:
    """Whether it is a public class below `bases`."""
    if not (inspect.isclass(value) and issubclass(value, bases)) or value.__name__.startswith("_"):
        return False
    return value not in (
        Optimizer,
        lr_scheduler.LRScheduler,
        getattr(lr_scheduler, "LambdaLR", None),
    )


def _mismatch(option: inspect.Parameter, value: Any) -> str | None:
    """What a value must be, when it is not of the type of the option's default; None when it fits
    or none can be told."""
    default = option.default
    if isinstance(value, dict) and any(
        kind in str(option.annotation) for kind in ("dict", "Mapping", "Any")
    ):
        return None
    if isinstance(value, tuple) and any(
        kind in str(option.annotation) for kind in ("list", "Sequence")
    ):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "it must be true or false"
    if isinstance(default, (int, float)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if number else f"it must be a number; the default is {default}"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"it must be a text, such as '{default}'"
    if isinstance(default, tuple):
        fits = isinstance(value, tuple) and (not default or len(value) == len(default))
        how_many = f" of {len(default)} values, such as {list(default)}" if default else ""
        return None if fits else f"it must be a list{how_many}"
    return None


def located(run_file: RunFile, path: tuple[str, ...], make: Callable[[], Any]) -> Any:
    """Call `make`; what it complains about is told with the place in the run file."""
    try:
        return make()
    except (UserError, ValueError, TypeError) as error:
        raise run_file.error(path, str(error)) from None
