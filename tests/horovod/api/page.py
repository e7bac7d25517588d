"""`python -m tests.horovod.api.page`: write docs/horovod_api.md from the calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from allhands.horovod.absent import ABSENT
from tests.horovod.api.calls import MODULES

PAGE = Path(__file__).parents[3] / "docs" / "horovod_api.md"
HEAD = """# Horovod's calls, one by one

Every call that the documentation of Horovod 0.28 lists. *Works*: it takes Horovod's arguments and
gives what Horovod's does. *Differs*: it takes them, and the difference is said. *Refused*: it
raises an error that names what to use. [From Horovod](horovod.md) says more.

`make horovod` writes this page from `tests/horovod/api/calls.py`. Tests compare that with the
modules, and call each of them on two workers: it has to be there and to take these arguments.

"""


def write() -> str:
    """The page."""
    states = Counter(call.state for calls in MODULES.values() for call in calls)
    counted = ", ".join(f"{states[state]} {text}" for state, text in _STATES.items())
    parts = [f"{HEAD}Of {sum(states.values())} calls {counted}.\n"]
    for module, calls in MODULES.items():
        rows = [f"| `{call.name}` | {call.state} | {call.note} |" for call in calls]
        parts.append(
            "\n".join(
                [
                    f"\n## {module}\n",
                    "| call | here | what differs, or what to use |",
                    "|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    rows = [f"| `{name}` | refused | use {text} |" for name, text in ABSENT.items()]
    head = (
        "\n## What is not here\n\nImporting one of these modules, or calling `horovod.run`, raises"
    )
    head += " an error that says the same.\n"
    parts.append("\n".join([head, "| module | here | what to use |", "|---|---|---|", *rows, ""]))
    return "".join(parts)


_ABSENT = """
## What is not here

Importing one of these modules, or calling `horovod.run`, raises an error that says the same.
"""
_STATES = {"works": "work", "differs": "differ", "refused": "are refused"}


if __name__ == "__main__":
    PAGE.write_text(write())
    print(f"written to {PAGE}")
