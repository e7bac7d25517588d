"""What the example scripts of a folder with MXNet's source ask of a store and a trainer.

They compute with MXNet's arrays, so that they cannot run here; their calls of the store can.
"""

from __future__ import annotations

import ast
from pathlib import Path

from allhands import UserError
from allhands.kvstore.store_modes import mode_named
from tests.peers.mxnet_calls import SECTIONS

_NAMES = {name.rpartition(".")[2] for section in SECTIONS.values() for name in section.notes}
# Words that have other meanings in scripts as well.
_AMBIGUOUS = {"init", "type", "update", "push", "optimizer"}


def outcomes(checkout: Path) -> dict[str, tuple[str, str]]:
    """The state of each script that has a store or a trainer, and which calls it makes."""
    found = {}
    for script in sorted((checkout / "example").rglob("*.py")):
        state = _outcome(script.read_text())
        if state is not None:
            found[str(script.relative_to(checkout))] = state
    return found


def _outcome(text: str) -> tuple[str, str] | None:
    tree = ast.parse(text)
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = sorted((words & _NAMES) - _AMBIGUOUS)
    kinds = _kinds(tree)
    if "Trainer" not in used and not kinds:
        return None
    for kind in kinds:
        try:
            mode_named(kind)
        except UserError as error:
            return "refused", str(error).partition("; write ")[2]
    stores = "".join(f", `create('{kind}')`" for kind in kinds)
    called = ", ".join(f"`{name}`" for name in used if name != "create")
    return "differs", f"with PyTorch's arrays; {called}{stores} are here"


def _kinds(tree: ast.AST) -> list[str]:
    """The kinds of stores that a script names: in `create`, or as a trainer's `kvstore`."""
    kinds = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        given = [one.value for one in node.keywords if one.arg == "kvstore"]
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name == "create" and ast.unparse(owner or node).split(".")[-1] in ("kv", "kvstore"):
            given += node.args[:1]
        kinds |= {
            one.value
            for one in given
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
    return sorted(kinds)
