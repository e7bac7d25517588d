"""Our Flower `ServerApp`: the rounds of a run file, with whatever sites are connected to the
SuperLink."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from allhands.config import read_run
from allhands.errors import UserError
from allhands.federated.sites.site_keys import read_allow_list
from allhands.federated.sites.site_training import Across, SiteRunner, across_sites

#: The variable that names the server's state folder, and the file in it that says what to run.
STATE, SETTINGS = "ALLHANDS_SITES_STATE", "server.json"
#: The variable that names a generated app's run file.
RUN_FILE = "ALLHANDS_SITES_RUN"
# In the layer above this one.
_TRAIN = "allhands.cli.run_training"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What Flower calls."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _leave) if here else None
    try:
        serve(grid, settings_of(os.environ))
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)


def settings_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """What to run: what `allhands federated server` has written down, or a generated app's run
    file.
    """
    state, run_file = environ.get(STATE), environ.get(RUN_FILE)
    if state is not None:
        settings: dict[str, Any] = json.loads((Path(state) / SETTINGS).read_text(encoding="utf-8"))
        return settings
    if run_file is not None:
        return {"config": [run_file], "overrides": []}
    raise UserError(
        f"neither {STATE} nor {RUN_FILE} is set: this app is started by `allhands federated "
        "server`, or is part of one that `allhands federated app` has written"
    )


def serve(grid: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train what is asked for; returns the history.

    Args:
        grid: Flower's `Grid`.
        settings: ``config`` (paths of run files), ``overrides``, and where there are any: ``data``
            (the root of the server's own data), ``allow`` (the list of the sites' keys), ``tokens``
            (the file of the sites' tokens).

    Raises:
        UserError: something in the run file cannot be honoured, or too few sites came.
    """
    data, allow, tokens = (settings.get(name) for name in ("data", "allow", "tokens"))
    overrides = list(settings["overrides"]) + (
        [f"data.root={json.dumps(data)}"] if data is not None else []
    )
    run_file = read_run([Path(path) for path in settings["config"]], overrides)
    allowed = None if allow is None else read_allow_list(allow)
    across = Across(grid, allowed, None if tokens is None else Path(tokens), data is not None)
    train = importlib.import_module(_TRAIN).train
    history: dict[str, Any] = train(run_file, partial(across_sites, across=across), SiteRunner)
    return history


def _leave(number: int, _: FrameType | None) -> None:
    """The round that is under way is abandoned; what the last one has saved is there."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)
