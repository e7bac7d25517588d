"""Names and options of optimizers: which a store can run, and whether the options are right.

A server updates chunks of keys, so only optimizers are taken whose update of one number depends on
that number alone. No class is ever looked up from what a worker sends: names are those below, and
those of the entry-point group ``allhands.optimizers`` on the machine that runs the update.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from allhands.errors import UserError, did_you_mean

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
        torch.optim.Rprop,
    )
}
_BUILT_IN = frozenset(CLASSES)

# What a name that cannot be had should be replaced by.
REFUSED = {
    "lbfgs": "LBFGS looks at all parameters at once; write 'sgd' or 'adam'",
    "adafactor": "Adafactor's update of one number depends on its row and column; write 'adamw'",
    "muon": "Muon's update of one number depends on its whole matrix; write 'adamw'",
    "sparseadam": "write 'adam', and init the key with RowSparse(rows, columns): its rows are then "
    "updated lazily",
}
REFUSED["sparse_adam"] = REFUSED["sparseadam"]

# How torch computes, not what; the store computes with the plain loop.
HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as it travels to servers and into files.

    Attributes:
        name: a name of `known_optimizers`: a class of torch.optim in lower case, such as "adamw".
        groups: the options of each group under torch's names, complete, as JSON has them (betas are
            a list). Usually one group. ``multi_precision`` is ours: weights of 16 bits have a
            float32 copy, which is what is updated.
    """

    name: str
    groups: tuple[dict[str, Any], ...]


def known_optimizers() -> list[str]:
    """The names that a store on this machine can run."""
    return [*sorted(_BUILT_IN), *sorted({entry.name.lower() for entry in _entries()} - _BUILT_IN)]


def name_of(name: str) -> str:
    """The name in lower case."""
    lowered = name.lower()
    if lowered in CLASSES or any(entry.name.lower() == lowered for entry in _entries()):
        return lowered
    if lowered in REFUSED:
        raise UserError(
            f"a store cannot run '{name}': {REFUSED[lowered]}. Known are: "
            f"{', '.join(known_optimizers())}"
        )
    raise UserError(f"there is no optimizer '{name}'{nearest(name, known_optimizers())}")


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """The class of a name that `name_of` has passed; one of an entry point is imported when it is
    first asked for."""
    if name not in CLASSES:
        entry = next(entry for entry in _entries() if entry.name.lower() == name)
        try:
            cls = entry.load()
        except Exception as error:
            raise UserError(
                f"the optimizer '{name}' ({entry.value}) is installed, but cannot be imported: "
                f"{error}"
            ) from error
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise UserError(
                f"the optimizer '{name}' ({entry.value}) is no subclass of torch.optim.Optimizer"
            )
        CLASSES[name] = cls
    return CLASSES[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` when there is something close, and all that is known. Goes behind a
    name that does not exist."""
    names = list(known)
    near = did_you_mean(word, names, "")
    return f"{near} Known are: {', '.join(names)}" if near else f"; known are: {', '.join(names)}"


def build(
    name: str, params: list[torch.Tensor], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The torch optimizer, which updates with the plain loop."""
    cls = class_of(name)
    takes = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {flag: False for flag in ("foreach", "fused") if flag in takes}
    return cls(params, **arguments, **{option: native(value) for option, value in options.items()})


def native(value: Any) -> Any:
    """What torch takes in place of what JSON has."""
    return tuple(value) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """What JSON has in place of tensors of one number, NumPy's numbers, and tuples of them."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, int, float)):
        return float(value)
    return value


@lru_cache
def defaults_of(name: str) -> dict[str, Any]:
    """The options that the constructor takes, with their defaults, but for those that say how to
    compute."""
    parameters = list(inspect.signature(class_of(name)).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        one.name: one.default for one in parameters if one.kind in named and one.name not in HOW
    }


@lru_cache
def changeable(name: str) -> frozenset[str]:
    """The options that may change between steps: the numbers, but for those of the first state."""
    return frozenset(
        option
        for option, default in defaults_of(name).items()
        if option != "initial_accumulator_value"
        and not isinstance(default, bool)
        and isinstance(default, (int, float, tuple, list))
    )


def complete(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a group, with torch's defaults.

    Raises:
        UserError: there is no such option, or torch refuses a value.
    """
    defaults = defaults_of(name)
    for option in options:
        if option not in defaults and option != "multi_precision":
            raise UserError(
                f"the optimizer '{name}' has no option "
                f"'{option}'{nearest(option, [*defaults, 'multi_precision'])}"
            )
    full: dict[str, Any] = {}
    for option, default in defaults.items():
        value = options.get(option, default)
        if value is inspect.Parameter.empty:
            raise UserError(f"the optimizer '{name}' needs the option '{option}'")
        full[option] = _of_kind(name, option, value, default)
    layout_of(name, full)
    if _of_kind(name, "multi_precision", options.get("multi_precision", False), False):
        full["multi_precision"] = True
    return full


def changed(name: str, options: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The options after those of `new` were set.

    Raises:
        UserError: an option does not exist, cannot change, or torch refuses the value.
    """
    for option in new:
        if option not in changeable(name):
            what = "cannot change its option" if option in defaults_of(name) else "has no option"
            raise UserError(
                f"between steps, the optimizer '{name}' {what} "
                f"'{option}'{nearest(option, sorted(changeable(name)))}"
            )
    checked = {
        option: _of_kind(name, option, value, defaults_of(name)[option])
        for option, value in new.items()
    }
    whole = {**options, **checked}
    _accepted(name, _freeze(whole))
    return whole


def layout_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The states that an optimizer keeps, by name: None for a tensor, the type (of torch or Python)
    of a number.

    Raises:
        UserError: torch refuses the options, or the update of one number depends on others.
    """
    return _layout(name, _freeze(options))


def _entries() -> Iterable[EntryPoint]:
    return entry_points(group="allhands.optimizers")


def _freeze(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _of_kind(name: str, option: str, given: Any, default: Any) -> Any:
    """`given` as JSON has it, when it is of the kind that the default is of."""

    def number(one: Any) -> bool:
        return isinstance(one, (int, float)) and not isinstance(one, bool) and math.isfinite(one)

    value = plain(given)
    if isinstance(default, bool):
        right, kind = isinstance(value, bool), "True or False"
    elif isinstance(default, (int, float)):
        right, kind = number(value), "a finite number"
    elif isinstance(default, (tuple, list)):
        right = (
            isinstance(value, list)
            and len(value) == len(default)
            and all(number(one) for one in value)
        )
        kind = f"{len(default)} finite numbers"
    else:
        right = value is None or isinstance(value, (bool, int, float, str))
        kind = "a number, a string or None"
    if not right:
        raise UserError(f"the optimizer '{name}' cannot have {option}={given!r}; it must be {kind}")
    return [float(one) for one in value] if isinstance(default, (tuple, list)) else value


@lru_cache(maxsize=64)  # all chunks of a step ask for the same
def _accepted(name: str, frozen: str) -> None:
    try:
        build(name, [torch.zeros(1)], json.loads(frozen))
    except Exception as error:
        raise UserError(
            f"the optimizer '{name}' does not work with {json.loads(frozen)}: {error}"
        ) from error


@lru_cache(maxsize=64)
def _layout(name: str, frozen: str) -> dict[str, Any]:
    """Takes steps with a few numbers, as one chunk and as two, to find out."""
    options = json.loads(frozen)

    def trained(pieces: list[torch.Tensor]) -> dict[str, Any]:
        optimizer = build(name, list(pieces), options)
        for scale in (1.0, -0.5, 0.25):
            for piece, grad in zip(
                pieces,
                torch.arange(1.0, 7.0).mul_(scale).split([len(piece) for piece in pieces]),
                strict=True,
            ):
                piece.grad = grad
            optimizer.step()
        return optimizer.state[pieces[0]]

    whole, pieces = torch.linspace(-1, 1, 6), list(torch.linspace(-1, 1, 6).split(3))
    try:
        state = trained([whole])
        trained(pieces)
    except Exception as error:
        raise UserError(f"the optimizer '{name}' does not work with {options}: {error}") from error
    if name not in _BUILT_IN and not torch.equal(whole, torch.cat(pieces)):
        raise UserError(
            f"the optimizer '{name}' ({class_of(name).__module__}.{class_of(name).__name__}) "
            "updates a number by others than itself, so that a key cannot be cut into chunks; "
            f"known are: {', '.join(known_optimizers())}"
        )

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype if value.dim() == 0 else None
        return type(value)

    return {key: kind(value) for key, value in state.items() if value is not None}
