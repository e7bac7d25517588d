"""Values of a run file as the arguments of a class or function, by what its signature says."""

from __future__ import annotations

import collections.abc
import inspect
import json
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

import torch
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from allhands.cli import own_objects
from allhands.errors import UserError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def arguments_of(kind: Any) -> dict[str, inspect.Parameter]:
    """What a class or function takes by name, in order, with types where it tells them."""
    try:
        found = inspect.signature(kind).parameters
    except ValueError:  # written in C
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}
    made = getattr(kind, "__init__", kind) if inspect.isclass(kind) else kind
    names = {**vars(collections.abc), **getattr(made, "__globals__", {})}
    return {key: one.replace(annotation=_type_of(one, names)) for key, one in found.items()}


def _type_of(option: inspect.Parameter, names: dict[str, Any]) -> Any:
    """The type of an argument; the text of it where only type checkers know its names."""
    found = option.annotation
    if isinstance(found, str):
        try:
            found = eval(found, names)  # of code that is called next
        except (NameError, TypeError, AttributeError, SyntaxError):
            return found
    if get_origin(found) is collections.abc.Iterable:  # pydantic would not look into it
        inside: Any = (*get_args(found), ...)
        return tuple.__class_getitem__(inside)
    return found


def schema_of(option: inspect.Parameter) -> dict[str, Any]:
    """The JSON schema of an argument; empty where its type has none."""
    annotation = option.annotation
    if isinstance(annotation, str) or annotation is option.empty:
        return {}
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [one for one in get_args(annotation) if one is not torch.Tensor]
        known = [schema_of(option.replace(annotation=one)) for one in kinds]
        return {} if {} in known else {"anyOf": known}
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        found = dict(adapter.json_schema())
    except (PydanticUserError, TypeError, NameError):
        return {}
    text = json.dumps(found)
    # Of objects inside a list or dict; references would lead elsewhere in the whole schema.
    return {} if '"anyOf": []' in text or '"$ref"' in text else found


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether there is a ``**kwargs``."""
    return any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def fitted(option: inspect.Parameter, value: Any, by_type: bool) -> tuple[Any, str | None]:
    """The value to pass for one that was written, and what is wrong with it, if anything.

    A list becomes a tuple or a tensor where that is what the argument takes. ``file.py:function``
    becomes the function where it takes one.

    Args:
        option: the argument.
        value: as it was read from the run file.
        by_type: compare it with the argument's annotation, not with its default alone.
    """
    annotation = option.annotation
    if isinstance(value, str) and own_objects.is_own(value) and "Callable" in str(annotation):
        try:
            return own_objects.find(value, "class or function"), None
        except UserError as error:
            return value, str(error)
    if isinstance(value, list) and by_type and torch.Tensor in get_args(annotation):
        try:
            return torch.tensor(value), None
        except (TypeError, ValueError) as error:
            return value, f"it must be a list of numbers ({error})"
    tuples = _tuples(value, by_type)
    problem = _unlike_default(option, tuples)
    if problem or not by_type or annotation is option.empty or isinstance(annotation, str):
        return tuples, problem
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, TypeError, NameError):
        return tuples, None
    for candidate in (tuples, value):
        try:
            adapter.validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return candidate, None
    default = "" if option.default is option.empty else f"; the default is {option.default!r}"
    return tuples, f"it must be {in_words(annotation)}{default}"


def _tuples(value: Any, deep: bool) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(_tuples(item, deep) if deep else item for item in value)


def in_words(annotation: Any) -> str:
    """A type as a user of run files reads it: ``a number or null``."""
    if annotation in (None, type(None)):
        return "null"
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words = [in_words(one) for one in args if one is not torch.Tensor]
        return " or ".join(dict.fromkeys(words))
    if origin is not None and str(origin).endswith("Literal"):
        return " or ".join(repr(one) for one in args)
    if origin is not None and args:
        inner = " and ".join(dict.fromkeys(in_words(one) for one in args if one is not ...))
        return f"a list ({inner})"
    return str(inspect.formatannotation(annotation))


def _unlike_default(option: inspect.Parameter, value: Any) -> str | None:
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
