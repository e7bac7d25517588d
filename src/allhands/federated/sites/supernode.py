"""Flower's SuperNode, which looks for messages every half second and not every three, and for the
answers of this machine more often."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower

#: Seconds between two looks; each is one small request to the server.
INTERVAL = 0.5
#: Between two looks at what a process of this machine has made, which are no requests to anybody.
LOCAL = 0.1


def look_more_often(module: Any) -> None:
    """Let the SuperNode wait for `INTERVAL` where it waits for longer, and elsewhere for
    `LOCAL`.

    Raises:
        UserError: this Flower waits in another way.
    """
    if getattr(module, "time", None) is not time:
        raise UserError(f"this Flower's SuperNode does not wait by time.sleep: {flower.INSTALL}")
    module.time = SimpleNamespace(**vars(time))
    module.time.sleep = lambda seconds: time.sleep(
        INTERVAL if seconds > INTERVAL else min(seconds, LOCAL)
    )


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    look_more_often(importlib.import_module("flwr.supernode.start_client_internal"))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
