"""From files and overrides to a checked `RunConfig`, remembering where each value was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from allhands import errors
from allhands.config.schema import RunConfig
from allhands.errors import UserError

KeyPath = tuple[str, ...]

_OVERRIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)=(.*)", re.DOTALL)


class RunFile:
    """A checked run, and where each of its values comes from.

    Attributes:
        config: the values, defaults included.
    """

    def __init__(self, config: RunConfig, origins: Mapping[KeyPath, str]) -> None:
        self.config = config
        self._origins = dict(origins)

    def error(self, path: Sequence[str], problem: str) -> UserError:
        """An error about the value at `path`, such as ``("optimizer", "lr")``; says where the value
        was written."""
        return UserError(_message(self._origins, self.config.model_dump(), tuple(path), problem))

    def to_yaml(self) -> str:
        """The whole run as a file that gives the same run when it is read."""
        return yaml.safe_dump(self.config.model_dump(), sort_keys=False, allow_unicode=True)


def read_run(
    files: Iterable[str | Path] = (),
    overrides: Iterable[str] = (),
    further: Callable[[RunFile], list[str]] | None = None,
) -> RunFile:
    """Read run files, later ones changing earlier ones key by key, then overrides such as
    ``optimizer.lr=0.01``.

    Args:
        files: in YAML.
        overrides: ``key=value``.
        further: where something is wrong, finds what else is wrong in all that is right so far.

    Raises:
        UserError: a file that cannot be read, an unknown key or a value of the wrong type; all of
            them are named, each with its file and line.
    """
    merged: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for file in files:
        values, places = _read_file(Path(file))
        _merge(merged, values, places, origins, ())
    for text in overrides:
        path, value = parse_override(text)
        where = f"command line, {text}"
        nested: Any = value
        for key in reversed(path):
            nested = {key: nested}
        _merge(
            merged, nested, {path[:depth]: where for depth in range(1, len(path) + 1)}, origins, ()
        )
    try:
        config = RunConfig.model_validate(merged)
    except ValidationError as failed:
        found = [_describe(origins, merged, error) for error in failed.errors()]
        rest = _without(merged, failed)
        if further is not None and rest is not None:
            found = further(RunFile(rest, origins)) + found
        raise UserError("\n  ".join(found)) from None
    return RunFile(config, origins)


def _without(values: dict[str, Any], failed: ValidationError) -> RunConfig | None:
    for error in failed.errors():
        path = error["loc"] if error["type"] != "missing" else error["loc"][:-1]
        parent: Any = values
        for key in path[:-1]:
            is_there = key in parent if isinstance(parent, dict) else isinstance(parent, list)
            parent = parent[key] if is_there else None
        if isinstance(parent, dict) and path:
            parent.pop(path[-1], None)
    try:
        return RunConfig.model_validate(values)
    except (ValidationError, IndexError):
        return None


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """``optimizer.lr=1e-3`` as its path and its value, which is read as YAML."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} is no override; write key=value, such as optimizer.lr=0.01 (run files are "
            "given with -C)"
        )
    try:
        return tuple(match[1].split(".")), yaml.load(match[2], Loader=_YamlLoader)
    except yaml.YAMLError as error:
        raise UserError(
            f"the value in {text!r} is not YAML: {_problem(error)}; quote it: {match[1]}=\"'…'\""
        ) from None


def nearest(word: str, names: Iterable[str]) -> str:
    """``did you mean …? Known are: …`` for a name that does not exist."""
    known = list(names)
    near = errors.nearest(word, known)
    guess = f"did you mean '{near}'? " if near else ""
    return f"{guess}Known are: {', '.join(known)}"


# ---------------------------------------------------------------------- YAML


class _YamlLoader(yaml.SafeLoader):
    """Safe loading by the rules of YAML 1.2: ``1e-3`` is a number, ``no`` is a string, a date is a
    string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not a name", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' was written in line {seen[key]} already; remove one "
                    "of the two",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
_YamlLoader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    _YamlLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first)
    )


def _read_file(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The values of one file, and for each key path the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"the run file {str(path)!r} cannot be read: {reason}{_similar(path)}"
        ) from None
    loader = _YamlLoader(text)
    try:
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{line}: {_problem(error)}") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: a run file holds keys and values, such as 'num_epochs: 10'; this one holds a "
            f"{_kind(values)}"
        )
    return values, dict(_places(node, path, ())) if node is not None else {}


def _places(node: yaml.Node, file: Path, above: KeyPath) -> Iterable[tuple[KeyPath, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*above, str(key.value))
            yield here, f"{file}, line {key.start_mark.line + 1}"
            yield from _places(value, file, here)
    if isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            here = (*above, str(number))
            yield here, f"{file}, line {value.start_mark.line + 1}"
            yield from _places(value, file, here)


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).strip()


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yml", ".yaml")]
    except OSError:
        return f"; there is no folder {str(path.parent)!r}"
    near = errors.nearest(path.name, names)
    return f"; did you mean {str(path.parent / near)!r}?" if near else ""


# ---------------------------------------------------------------------- merging


def _merge(
    base: dict[str, Any],
    new: Mapping[str, Any],
    places: Mapping[KeyPath, str],
    origins: dict[KeyPath, str],
    above: KeyPath,
) -> None:
    """Put `new` over `base`, in place: mappings key by key, everything else as a whole."""
    for key, value in new.items():
        here = (*above, key)
        old = base.get(key)
        if isinstance(value, Mapping) and isinstance(old, str) and _takes_name(here):
            # `optimizer: adamw` in one file, `optimizer.lr=0.1` after it.
            old = base[key] = {"name": old}
        origins[here] = places.get(here, origins.get(here, ""))
        if isinstance(value, Mapping) and isinstance(old, dict):
            _merge(old, value, places, origins, here)
            continue
        for stale in [path for path in origins if path[: len(here)] == here and path != here]:
            del origins[stale]
        origins.update({path: place for path, place in places.items() if path[: len(here)] == here})
        base[key] = _copied(value)


def _copied(value: Any) -> Any:
    return (
        {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


def _takes_name(path: KeyPath) -> bool:
    model = _section_at(path)
    return model is not None and "name" in model.model_fields


# ---------------------------------------------------------------------- errors


def _describe(
    origins: Mapping[KeyPath, str], values: Mapping[str, Any], error: Mapping[str, Any]
) -> str:
    path = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section = _section_at(path[:-1])
        names = section.model_fields if section is not None else ()
        meant = _sections_with(path[-1]) if len(path) == 1 else []
        hint = f"write {' or '.join(meant)}" if 0 < len(meant) < 3 else nearest(path[-1], names)
        return _message(origins, values, path, f"there is no such key; {hint}")
    if error["type"] == "missing":
        return _message(origins, values, path, "this key must be given")
    if error["type"] in ("model_type", "model_attributes_type"):
        section = _section_at(path)
        a_name = "a name, or " if section is not None and "name" in section.model_fields else ""
        inside = ", ".join(section.model_fields) if section is not None else ""
        return _message(origins, values, path, f"it must be {a_name}keys and values ({inside})")
    problem = str(error["msg"]).replace("Input should be", "it must be").replace("a valid ", "a ")
    problem = (
        problem.replace("integer", "whole number")
        .replace("a boolean", "true or false")
        .replace("string", "text")
    )
    return _message(origins, values, path, problem)


def _message(
    origins: Mapping[KeyPath, str], values: Mapping[str, Any], path: KeyPath, problem: str
) -> str:
    """``run.yml, line 7: optimizer.lr = 'x': it must be a number``."""
    place = next((origins[path[:n]] for n in range(len(path), 0, -1) if origins.get(path[:n])), "")
    value: Any = values
    for key in path:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            value = _ABSENT
            break
    # A section is named, not printed.
    shown = "" if value is _ABSENT or isinstance(value, dict) else f" = {value!r}"
    return f"{place + ': ' if place else ''}{'.'.join(path)}{shown}: {problem}"


_ABSENT = object()


def _section_at(path: Iterable[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = RunConfig
    for key in path:
        if key.isdecimal():  # of a list of sections
            continue
        field = section.model_fields.get(key)
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        candidates += [inner for one in candidates for inner in get_args(one)]
        found = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if found is None:
            return None
        section = found
    return section


# Options that most optimizers have; the section takes any.
_OF_OPTIMIZERS = ("lr", "momentum", "weight_decay", "betas", "eps")


def _sections_with(key: str) -> list[str]:
    """The key with each section of a run file that has it."""
    if key in _OF_OPTIMIZERS:
        return [f"optimizer.{key}"]
    sections = ((name, _section_at([name])) for name in RunConfig.model_fields)
    return [
        f"{name}.{key}" for name, one in sections if one is not None and key in one.model_fields
    ]


def _kind(value: Any) -> str:
    return {list: "list", str: "text", type(None): "nothing"}.get(type(value), type(value).__name__)
