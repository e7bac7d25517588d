"""Flower's SuperNode, which looks for messages more often: soon after its last one several times a
second, later every half second, and not every three."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower

#: Seconds between two looks at most; each is one small request to the server.
INTERVAL = 0.5
#: And at least, which also lie between two looks at what a process of this machine has made; these
#: are no requests to anybody.
LOCAL = 0.1
#: Of the time since the last message is waited between two looks: who waits for the next message
#: of a round that takes seconds waits little longer for looking.
PATIENCE = 0.05


def look_more_often(module: Any) -> None:
    """Let the SuperNode wait for `INTERVAL` at most where it waits for longer, and elsewhere for
    `LOCAL`.

    Raises:
        UserError: this Flower waits in another way.
    """
    if getattr(module, "time", None) is not time:
        raise UserError(f"this Flower's SuperNode does not wait by time.sleep: {flower.INSTALL}")
    module.time = SimpleNamespace(**vars(time))
    last = time.monotonic()

    def sleep(seconds: float) -> None:
        nonlocal last
        if seconds > INTERVAL:
            seconds = min(INTERVAL, max(LOCAL, PATIENCE * (time.monotonic() - last)))
        else:  # for the answer to a message
            last, seconds = time.monotonic(), min(seconds, LOCAL)
        time.sleep(seconds)

    module.time.sleep = sleep


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    look_more_often(importlib.import_module("flwr.supernode.start_client_internal"))
    flower.ask_again_soon()
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
