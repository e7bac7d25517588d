"""Stands for `flwr-serverapp`: runs our ServerApp, whatever app was submitted.

Flower starts it for every run that somebody submits. It runs nothing of what was submitted, and
only for the run that the server itself has submitted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower, flower_compat

#: The variable that names the server's state folder.
STATE = "ALLHANDS_SITES_STATE"
RUN_ID, PID, LOG = "run_id", "serverapp.pid", "serverapp.log"


def ours(state: Path, run_id: int, wait: float = 20.0) -> bool:
    """Whether the server has submitted that run; it writes down which, a moment after it was
    submitted."""
    deadline = time.monotonic() + wait
    while not (state / RUN_ID).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return (state / RUN_ID).read_text(encoding="utf-8") == str(run_id)


def run_ours(state: Path, load: Any) -> Any:
    """What replaces Flower's function that loads and runs the submitted app."""

    def run(grid: Any, context: Any, **_: Any) -> Any:
        if not ours(state, context.run_id):
            raise UserError(
                f"run {context.run_id} was submitted by somebody else; allhands runs none but its "
                "own"
            )
        # For the server to tell it to end.
        (state / PID).write_text(str(os.getpid()), encoding="utf-8")
        try:
            load()(grid=grid, context=context)
        finally:
            (state / PID).unlink(missing_ok=True)
        return context

    return run


def replace_loading(module: Any, state: Path) -> None:
    """Let Flower's process take our app for the one that was submitted, and write nothing of that
    one to the disk.

    Raises:
        UserError: this Flower has not the names that are replaced.
    """
    flower_compat.SERVER_APP.checked(module)

    def app() -> Any:
        from allhands.federated.sites.server_app import app

        return app

    def config(folder: Any, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(overrides or {})

    module.install_from_fab = lambda *_, **__: None
    module.get_fab_metadata = lambda *_: ("allhands/training", "1.0.0")
    module.get_project_dir = lambda *_: state
    module.get_project_config = lambda *_: {
        "tool": {"flwr": {"app": {"components": {"serverapp": "allhands"}}}}
    }
    module.get_fused_config_from_dir = config
    module.run_ = run_ours(state, app)


def main() -> None:
    """`flwr-serverapp`, with its own arguments. What it prints goes into a file of the state
    folder: Flower discards it."""
    state = Path(os.environ[STATE])
    log = os.open(state / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    flower.require()
    flower_compat.retry_soon()
    replace_loading(flower_compat.SERVER_APP.load(), state)
    flower_compat.flwr_serverapp()


if __name__ == "__main__":
    main()
