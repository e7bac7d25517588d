"""The long-lived process of a site: model, data, optimizer and device, and a socket on which
requests come in.

It is started by `allhands federated site`, or by a generated Flower app, with a file that says what
to do: ``define`` (the function that makes the objects), ``config`` and ``overrides`` (the run
file), ``name``, ``state``, ``token_file``, ``socket``, and ``idle`` (seconds without a request
after which it ends, or null).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from allhands.config import read_run
from allhands.errors import UserError
from allhands.federated.sites import local_socket
from allhands.federated.sites.definition import resolve
from allhands.federated.sites.site_keys import site_token

_MISTAKE = 2  # the exit code for what the user has to change, as the command line's


def run(settings: dict[str, Any]) -> None:
    """Build what the run file describes, and answer requests until nobody asks any more.

    Raises:
        UserError: the run file or the data cannot be used.
    """
    from allhands.federated.sites.site_worker import SiteWorker

    state = Path(settings["state"])
    token = site_token(settings["token_file"], os.environ)
    definition = resolve(settings["define"])(read_run(settings["config"], settings["overrides"]))
    worker = SiteWorker(definition, settings["name"], state / "kept", token, _say)
    listener = local_socket.Listener(Path(settings["socket"]))
    idle = settings["idle"]
    try:
        with open(state / "warm.running", "w", encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            _say(
                f"{settings['name']} is ready: {worker.num_samples:,} samples to train on, "
                f"{worker.num_tests:,} to test, on {worker.world.device.type}"
            )
            listener.serve(worker.handle, lambda waited: idle is None or waited < idle)
    finally:
        listener.close()


def _say(line: str) -> None:
    print(line, flush=True)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    """Run what the file in the first argument says."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"allhands: error: {error}", file=sys.stderr, flush=True)
        return _MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
