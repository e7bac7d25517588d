"""What a folder with a peer's source says: public names, methods and parameters. Nothing of it is
imported or kept."""

from __future__ import annotations

import ast
from pathlib import Path


def public_names(folder: Path) -> list[str]:
    """The names that a package imports into its own, without private ones and constants."""
    tree = ast.parse((folder / "__init__.py").read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return sorted(
        name
        for name in names
        if not (name.startswith("_") or name.isupper() or name in ("*", "LooseVersion"))
    )


def functions(file: Path) -> dict[str, tuple[str, ...]]:
    """The public functions of a file, and their parameters."""
    return _functions(ast.parse(file.read_text()).body)


def methods(file: Path, name: str) -> dict[str, tuple[str, ...]]:
    """A class of a file and its public methods and properties, with their parameters."""
    body = ast.parse(file.read_text()).body
    kind = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    made = next((node for node in kind.body if _is_function(node, "__init__")), None)
    found = {name: _parameters(made) if isinstance(made, ast.FunctionDef) else ()}
    for method, parameters in _functions(kind.body).items():
        found[f"{name}.{method}"] = parameters
    return found


def _functions(body: list[ast.stmt]) -> dict[str, tuple[str, ...]]:
    return {
        node.name: _parameters(node)
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return tuple(one.arg for one in given if one.arg not in ("self", "cls"))
