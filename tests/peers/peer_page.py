"""A page with the state of each of a peer's calls and example scripts."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allhands import UserError

STATES = {"works": "work", "differs": "differ", "refused": "are refused", "absent": "are absent"}
Parameters = tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Calls of one module or class of the peer's.

    Attributes:
        title: as the peer names it.
        module: ours that has the names.
        notes: by name; "" where the call works, else "differs: …" with the difference. A name that
            is refused has none: the error says what to write.
    """

    title: str
    module: str
    notes: Mapping[str, str] = field(default_factory=dict)

    def state_of(self, name: str, parameters: Parameters = ()) -> tuple[str, str]:
        """What becomes of a call, and what differs or what to write. "absent" for a call that ends
        in an AttributeError or TypeError without a word."""
        if name in self.notes:
            state, _, text = self.notes[name].partition(": ")
            missing = self._missing(name, parameters)
            if missing:
                return "absent", f"does not take {', '.join(missing)}"
            return state or "works", text
        return self._refusal(name)

    def ours(self, name: str) -> Any:
        """The object behind a name; "Class.method" for a method."""
        found: Any = importlib.import_module(self.module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _missing(self, name: str, parameters: Parameters) -> list[str]:
        owner, _, attribute = name.rpartition(".")
        found = getattr(self.ours(owner), attribute, None) if owner else self.ours(name)
        if not callable(found):  # a property, or an attribute of each object; it is tried
            return []
        taken = inspect.signature(found).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in taken):
            return []
        return [one for one in parameters if one not in {each.name for each in taken}]

    def _refusal(self, name: str) -> tuple[str, str]:
        owner, _, method = name.rpartition(".")
        try:
            if owner:
                kind = self.ours(owner)
                getattr(kind.__new__(kind), method)
            else:
                self.ours(name)
        except UserError as error:
            text = str(error)
            return "refused", text.partition("; write ")[2] or text.partition("; ")[2]
        except AttributeError:
            pass
        return "absent", ""


def page(
    head: str,
    sections: Mapping[str, tuple[Section, Mapping[str, Parameters]]],
    scripts: Mapping[str, tuple[str, str]],
) -> str:
    """The page's text.

    Args:
        head: its first lines.
        sections: by title, and the calls with their parameters that a checkout has.
        scripts: by path, the state and what a run has said.
    """
    tables, counts = [], Counter[str]()
    for title, (section, calls) in sections.items():
        states = {name: section.state_of(name, parameters) for name, parameters in calls.items()}
        counts.update(state for state, _ in states.values())
        tables.append(_table(title, "call", "what differs, or what to write", states))
    tables.append(_table("Example scripts", "script", "what is said", scripts))
    counted = ", ".join(
        f"{counts[state]} {text}" for state, text in STATES.items() if counts[state]
    )
    return "\n".join([f"{head}\nOf {sum(counts.values())} calls {counted}.\n", *tables])


def _table(title: str, first: str, last: str, states: Mapping[str, tuple[str, str]]) -> str:
    rows = [f"| `{name}` | {state} | {text} |" for name, (state, text) in states.items()]
    return "\n".join([f"## {title}\n", f"| {first} | here | {last} |", "|---|---|---|", *rows, ""])


def rows_of(text: str) -> list[tuple[str, str, str, str]]:
    """The rows of a page: section, name, state, what is said."""
    found, title = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        if line.startswith("| `"):
            name, state, note = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((title, name.strip("`"), state, note))
    return found
