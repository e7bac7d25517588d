"""Attributes of the user's own modules that differ from a fresh import: workers import a module
anew, and then get these.

A fresh import cannot be made in the caller, where it would have effects. What a module's source
says of an attribute is compared with what the attribute is: an attribute that it does not mention
was set later, a literal can be compared, and what is built from literals and classes alone is the
same in every process. What it computes otherwise, as from variables of the environment that differ
between ranks, stays as each worker computes it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allhands.launch.ship import can_pickle

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.expr_context, ast.keyword)
_LITERAL = (
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.Set,
    *_OPERATORS,
)
_BUILT = (*_LITERAL, ast.Name, ast.Attribute, ast.Call)
# Functions of these, of the same name in the second, give the same tensors and arrays in every
# process.
_MAKERS = {
    "torch": {"tensor", "zeros", "ones", "full", "arange", "linspace", "eye"},
    "numpy": {"array", "zeros", "ones", "full", "arange", "linspace", "eye"},
}

# Python's parser fails where two threads are in it (gh-106905).
_parsing = threading.Lock()

# Attributes by module: values that need no module of the user's, and others.
Changes = dict[str, dict[str, Any]]


def changed() -> tuple[Changes, Changes]:
    """What differs from a fresh import, in the modules of the user that are imported here: plain
    values, and objects."""
    plain: Changes = {}
    objects: Changes = {}
    for module in _own_modules():
        said = _said_by(module)
        if said is None:
            continue
        for name, value in list(vars(module).items()):
            if (
                name.startswith("__")
                or isinstance(value, types.ModuleType)
                or not _differs(module, name, value, said)
            ):
                continue
            if _is_plain(value):
                plain.setdefault(module.__name__, {})[name] = value
            elif can_pickle(value) is None:
                objects.setdefault(module.__name__, {})[name] = value
    return plain, objects


@functools.cache
def _not_the_users() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [
        *site.getsitepackages(),
        site.getusersitepackages(),
        sys.prefix + "/lib",
        str(Path(__file__).parents[1]),
    ]
    return tuple(str(Path(folder).resolve()) + "/" for folder in folders)


def _own_modules() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            type(module) is not types.ModuleType
            or not isinstance(file, str)
            or name != module.__name__
        ):
            continue
        if name in ("__main__", "__mp_main__") or not _is_the_users(file):
            continue
        # What a library writes and imports itself, such as the kernels of PyTorch's compiler, is
        # named as a part of it.
        top = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
        if top is None or _is_the_users(top):
            yield module


@functools.cache
def _is_the_users(file: str) -> bool:
    path = str(Path(file).resolve())
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return path.endswith(".py") and not installed and not path.startswith(_not_the_users())


def _said_by(module: types.ModuleType) -> Mapping[str, ast.AST | None] | None:
    """What the source gives each name: an expression, an import, or None for anything else."""
    file = str(module.__file__)
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        return _parsed(file, Path(file).stat().st_mtime_ns)
    return None


@functools.cache
def _parsed(file: str, _changed_at: int) -> Mapping[str, ast.AST | None]:
    said: dict[str, ast.AST | None] = {}
    with _parsing:
        tree = ast.parse(Path(file).read_bytes())
    for name, node in _given(tree.body):
        said[name] = None if name in said else node
    return said


def _given(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
                else:
                    yield from (
                        (node.id, None) for node in ast.walk(target) if isinstance(node, ast.Name)
                    )
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                    yield node.id, None
                elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    yield node.name, None
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    yield from (
                        (alias.asname or alias.name.partition(".")[0], None) for alias in node.names
                    )


def _differs(
    module: types.ModuleType, name: str, value: Any, said: Mapping[str, ast.AST | None]
) -> bool:
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__module__ == "__main__"  # put there by the script
    if name not in said:
        return "*" not in said
    node = said[name]
    if isinstance(node, ast.ImportFrom):
        origin = vars(module).get("__package__") if node.level else ""
        source = sys.modules.get(".".join(filter(None, [origin, node.module])))
        return (
            node.level <= 1
            and source is not None
            and vars(source).get(_original(node, name), value) is not value
        )
    if not isinstance(node, ast.expr):
        return False
    if all(isinstance(part, _LITERAL) for part in ast.walk(node)):
        with contextlib.suppress(Exception):
            return not _equal(
                value,
                eval(compile(ast.Expression(node), "<literal>", "eval"), {"__builtins__": {}}),
            )
    return _is_built(node, vars(module), said)


def _original(node: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in node.names if (alias.asname or alias.name) == name)


def _equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return list(value) == list(other) and all(
            _equal(item, other[key]) for key, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def _is_built(
    node: ast.AST, names: Mapping[str, Any], said: Mapping[str, ast.AST | None], depth: int = 0
) -> bool:
    """Whether an expression is made of literals, classes, and names of which that holds."""
    for part in ast.walk(node):
        if not isinstance(part, _BUILT):
            return False
        if isinstance(part, ast.Call) and not _makes_the_same(part.func, names):
            return False
        if isinstance(part, ast.Name):
            value, origin = names.get(part.id, getattr(builtins, part.id, None)), said.get(part.id)
            known = isinstance(value, (type, types.ModuleType)) or callable(value)
            if not known and not (
                isinstance(origin, ast.expr)
                and depth < 9
                and _is_built(origin, names, said, depth + 1)
            ):
                return False
        if isinstance(part, ast.Attribute) and ast.unparse(part).startswith(
            ("os.", "sys.", "torch.distributed")
        ):
            return False
    return True


def _makes_the_same(node: ast.AST, names: Mapping[str, Any]) -> bool:
    """Whether what is called is a class, or a function that makes the same tensor everywhere."""
    path = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    value = names.get(node.id, getattr(builtins, node.id, None))
    for name in reversed(path):
        if isinstance(value, types.ModuleType) and name in _MAKERS.get(value.__name__, ()):
            return True
        value = vars(value).get(name) if isinstance(value, (types.ModuleType, type)) else None
    return isinstance(value, type)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(key) in _PLAIN and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN


# ---------------------------------------------------------------------- in the worker


def put(changes: Changes) -> None:
    """Set attributes of the user's modules: at once where they are imported, and else when they
    are."""
    for name, values in changes.items():
        if name in sys.modules:
            vars(sys.modules[name]).update(values)
        _finder.pending.setdefault(name, {}).update(values)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _PatchFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.pending: Changes = {}

    def find_spec(
        self, name: str, path: Any = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that others find, of a module that is to be changed."""
        if name not in self.pending:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchLoader(spec.loader, self.pending[name])
                return spec
        return None


class _PatchLoader(importlib.abc.Loader):
    """Runs a module as its own loader does, and then sets its attributes."""

    def __init__(self, loader: Any, values: dict[str, Any]) -> None:
        self.loader, self.values = loader, values

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Run it, and set what the caller has set."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        vars(module).update(self.values)


_finder = _PatchFinder()
