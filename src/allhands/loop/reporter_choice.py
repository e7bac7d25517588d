"""Who prints what a training says."""

from __future__ import annotations

import os
from collections.abc import Callable

from allhands.errors import UserError
from allhands.loop.notebook_reporter import NotebookReporter, in_notebook
from allhands.loop.reporter import ConsoleReporter, FirstRankReporter, JsonReporter, Reporter
from allhands.world import World
from allhands.world.regroup import began_with

#: The variable that says how trainings print.
OUTPUT = "ALLHANDS_OUTPUT"


def console(verbose: bool) -> Reporter:
    """What prints in the process of the user; the variable ``ALLHANDS_OUTPUT`` says how: "quiet"
    prints nothing, "json" lines of JSON.

    Raises:
        UserError: the variable says something else.
    """
    output = os.environ.get(OUTPUT, "")
    if output == "quiet":
        return Reporter()
    if output == "json":
        return JsonReporter()
    if output:
        raise UserError(f"{OUTPUT}={output!r}; write quiet or json, or leave it out")
    return NotebookReporter(verbose) if in_notebook() else ConsoleReporter(verbose)


def reporter_of(world: World, make: Callable[[], Reporter]) -> Reporter:
    """What `make` gives, on rank 0; nothing is said on the others."""
    if began_with() is not None:
        return FirstRankReporter(world, make())
    return make() if world.rank == 0 else Reporter()
