"""Writes docs/catalyst_api.md: which public names of a Catalyst checkout are here, refused or
absent. ``make peers CATALYST=FOLDER``; nothing of the checkout is imported or kept."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from allhands import UserError
from tests.peers.checkout import public_names

PAGE = Path(__file__).parents[2] / "docs" / "catalyst_api.md"
# Modules of ours, and the packages of Catalyst's whose names they have.
MODULES = {
    "dl": ("core", "runners", "callbacks", "callbacks/metrics", "engines", "loggers"),
    "metrics": ("metrics",),
    "utils": ("utils",),
}
HEAD = """# Catalyst's names, one by one

*Here*: the name is in `allhands.catalyst`; [From Catalyst](migrate_catalyst.md) says what differs.
*Refused*: an error says what to write. *Absent*: there is no such name.

`make peers CATALYST=FOLDER` writes this page from a folder with Catalyst's source, {version}.
"""


def state_of(module: str, name: str) -> str:
    """What happens to a script that imports the name, as cells of the table."""
    try:
        getattr(importlib.import_module(f"allhands.catalyst.{module}"), name)
    except UserError as error:
        return f"refused | {str(error).partition('; write ')[2]}"
    except AttributeError:
        return "absent | "
    return "here | "


def lines(catalyst: Path) -> Iterator[str]:
    """The page, of a checkout."""
    told: dict[str, str] = {}
    exec((catalyst / "__version__.py").read_text(), told)
    yield HEAD.format(version=told["__version__"])
    for module, packages in MODULES.items():
        names = sorted({name for one in packages for name in public_names(catalyst / one)})
        states = {name: state_of(module, name) for name in names}
        counts = {kind: sum(one.startswith(kind) for one in states.values()) for kind in STATES}
        yield f"## {module}\n"
        yield f"Of {len(names)} names {counts['here']} are here, {counts['refused']} are refused.\n"
        yield "| name | state | what to write |\n|---|---|---|"
        yield from (f"| `{name}` | {state} |" for name, state in states.items())
        yield ""


STATES = ("here", "refused", "absent")


def write(catalyst: Path) -> Path:
    """Write the page from a folder with Catalyst's source; returns its path."""
    PAGE.write_text("\n".join(lines(catalyst / "catalyst")).rstrip() + "\n")
    return PAGE
