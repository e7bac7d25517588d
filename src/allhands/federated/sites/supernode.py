"""Flower's SuperNode, which looks for messages every half second and not every three."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower

#: Seconds between two looks; each is one small request to the server.
INTERVAL = 0.5


def look_more_often(module: Any) -> None:
    """Let the SuperNode's waits be no longer than `INTERVAL`.

    Raises:
        UserError: this Flower waits in another way.
    """
    if getattr(module, "time", None) is not time:
        raise UserError(f"this Flower's SuperNode does not wait by time.sleep: {flower.INSTALL}")
    module.time = SimpleNamespace(**vars(time))
    module.time.sleep = lambda seconds: time.sleep(min(seconds, INTERVAL))


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    look_more_often(importlib.import_module("flwr.supernode.start_client_internal"))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
