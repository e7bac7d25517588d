"""Flower's SuperNode, which looks for messages every half second and not every three, and for the
answers of this machine more often, and tells the site's superexec of each message."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower
from allhands.federated.sites.task_pipe import TaskWriter

#: Seconds between two looks; each is one small request to the server.
INTERVAL = 0.5
#: Between two looks at what a process of this machine has made, which are no requests to anybody.
LOCAL = 0.05
# Flower's function that waits for the answer to a message and sends it. It is called when all of
# the message is there.
_ANSWER = "_push_messages"


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


def tell_of_tasks(module: Any, tell: Callable[[], object]) -> None:
    """Let the SuperNode call `tell` when a message is here and has to be answered.

    Raises:
        UserError: this Flower has no function that waits for an answer.
    """
    flower.require_names(module, [_ANSWER], "SuperNode")
    answer = getattr(module, _ANSWER)

    def told(*args: Any, **options: Any) -> Any:
        tell()
        return answer(*args, **options)

    setattr(module, _ANSWER, told)


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    flower.retry_soon()
    module = importlib.import_module("flwr.supernode.start_client_internal")
    look_more_often(module)
    tell_of_tasks(module, TaskWriter(os.environ).tell)
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
