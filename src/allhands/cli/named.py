"""Objects of classes that a run file names, from the options that stand beside the name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from allhands.cli import own_objects
from allhands.cli.typed_options import arguments_of, fitted, takes_any
from allhands.config import RunFile, nearest
from allhands.errors import UserError, did_you_mean

Path = tuple[str, ...]
_MANY = 40  # names that are listed in a message


@dataclass(frozen=True)
class Choice:
    """A class or function that was chosen by name, and the options that were written beside it.

    Attributes:
        run_file: where.
        path: of the section there.
        name: of the class or function.
        kind: itself.
        options: as they were written.
        leading: arguments that are passed by place.
        fills: arguments that are passed by name unless they are written.
        extra: arguments that ``**kwargs`` stands for.
        by_type: see `fitted`.
    """

    run_file: RunFile
    path: Path
    name: str
    kind: Any
    options: Mapping[str, Any]
    leading: int = 0
    fills: Collection[str] = ()
    extra: Collection[str] = ()
    by_type: bool = True

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What it takes by name."""
        return dict(list(arguments_of(self.kind).items())[self.leading :])

    def problems(self) -> list[str]:
        """All that is wrong with the options, each with its place in the run file."""
        found, parameters = [], self.parameters
        anything = takes_any(parameters)
        for key, value in self.options.items():
            path = (*self.path, key)
            if key in parameters:
                problem = fitted(parameters[key], value, self.by_type)[1]
                if problem:
                    found.append(str(self.run_file.error(path, problem)))
            elif not anything or (self.extra and key not in self.extra):
                known = [*parameters, *self.extra]
                text = f"{self.name} has no such option; {nearest(key, known)}"
                found.append(str(self.run_file.error(path, text)))
        missing = [
            key
            for key, p in parameters.items()
            if p.default is p.empty
            and key not in self.options
            and key not in self.fills
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if missing:
            text = f"write {'.'.join(self.path)}.{missing[0]}: …"
            text = f"{self.name} needs {', '.join(missing)}; {text}"
            found.append(str(self.run_file.error(self.path, text)))
        return found

    def make(self, *positional: Any, **filled: Any) -> Any:
        """Call it with `positional`, the options, and those of `filled` that are not written.

        Raises:
            UserError: an option is wrong; says where it was written.
        """
        options = {**filled, **self.options_fitted()}
        return located(self.run_file, self.path, lambda: self.kind(*positional, **options))

    def options_fitted(self) -> dict[str, Any]:
        """The options as they are passed.

        Raises:
            UserError: one is wrong; says where it was written.
        """
        raise_all(self.problems())
        parameters = self.parameters
        return {
            key: fitted(parameters[key], value, self.by_type)[0] if key in parameters else value
            for key, value in self.options.items()
        }


def raise_all(problems: list[str]) -> None:
    """Raise one `UserError` of them, if there are any."""
    if problems:
        raise UserError("\n  ".join(problems))


def choice(
    run_file: RunFile, section: str, known: Mapping[str, Any], leading: int = 0, **more: Any
) -> Choice:
    name, kind = choose(run_file, section, known)
    chosen = getattr(run_file.config, section)
    options = dict(chosen.options)
    if getattr(chosen, "lr", None) is not None:
        options["lr"] = chosen.lr
    return Choice(run_file, (section,), name, kind, options, leading, **more)


def choose(run_file: RunFile, section: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The class that a section names, in any spelling of capitals, and that class's own name."""
    wanted = getattr(run_file.config, section).name
    return among(run_file, (section, "name"), wanted, known, section)


def among(
    run_file: RunFile, path: Path, wanted: str, known: Mapping[str, Any], what: str
) -> tuple[str, Any]:
    """What the name at `path` stands for: one of `known` in any spelling of capitals, or a class or
    function of the user's; and its own name.

    Raises:
        UserError: there is none; says where it was written.
    """
    if own_objects.is_own(wanted):
        found = located(run_file, path, lambda: own_objects.find(wanted, "class or function"))
        return wanted.rpartition(":")[2], found
    lowered = {name.lower(): name for name in known}
    if wanted.lower() not in lowered:
        raise run_file.error(path, f"there is no such {what}; {_nearest(wanted, known)}")
    name = lowered[wanted.lower()]
    return name, known[name]


def _nearest(wanted: str, known: Collection[str]) -> str:
    if len(known) <= _MANY:
        return nearest(wanted, known)
    return did_you_mean(wanted, known, f"there are {len(known)}").removeprefix("; ")


def is_kind(value: Any, bases: Any) -> bool:
    """Whether it is a public class below `bases`."""
    if not (inspect.isclass(value) and issubclass(value, bases)) or value.__name__.startswith("_"):
        return False
    return value not in (Optimizer, lr_scheduler.LRScheduler)


def located(run_file: RunFile, path: Path, make: Callable[[], Any]) -> Any:
    """Call `make`; what it complains about is told with the place in the run file."""
    try:
        return make()
    except (UserError, ValueError, TypeError) as error:
        raise run_file.error(path, str(error)) from None
