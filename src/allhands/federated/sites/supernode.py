"""Flower's SuperNode, which looks for messages every half second and not every three, more often
while rounds follow one another, and for the answers of this machine more often, too."""

from __future__ import annotations

import importlib
import math
import time
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower

#: Seconds between two looks; each is one small request to the server.
INTERVAL = 0.5
#: Between two looks at what a process of this machine has made, which are no requests to anybody;
#: and between two looks at the server for as long after an answer as `SOON`.
LOCAL = 0.1
SOON = 5.0


def look_more_often(module: Any) -> None:
    """Let the SuperNode wait for `INTERVAL` where it waits for longer, and for `LOCAL` elsewhere,
    and so after an answer.

    Raises:
        UserError: this Flower waits in another way.
    """
    if getattr(module, "time", None) is not time:
        raise UserError(f"this Flower's SuperNode does not wait by time.sleep: {flower.INSTALL}")
    answered = -math.inf

    def sleep(seconds: float) -> None:
        nonlocal answered
        now = time.monotonic()
        if seconds <= INTERVAL:  # for the answer of this machine
            answered = now
        time.sleep(
            INTERVAL if seconds > INTERVAL and now - answered > SOON else min(seconds, LOCAL)
        )

    module.time = SimpleNamespace(**vars(time))
    module.time.sleep = sleep


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    look_more_often(importlib.import_module("flwr.supernode.start_client_internal"))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
