"""Flower's SuperNode, which looks for messages every half second and not every three, and for the
answers of this machine more often, and tells the site's superexec of each message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from allhands.federated.sites import flower, flower_compat
from allhands.federated.sites.flower_compat import SUPERNODE
from allhands.federated.sites.task_pipe import TaskWriter

#: Seconds between two looks; each is one small request to the server.
INTERVAL = 0.5
#: Between two looks at what a process of this machine has made, which are no requests to anybody.
LOCAL = 0.05


def look_more_often(module: Any) -> None:
    """Let the SuperNode wait for `INTERVAL` where it waits for longer, and elsewhere for
    `LOCAL`.

    Raises:
        UserError: this Flower waits in another way.
    """
    SUPERNODE.set_sleep(
        module,
        lambda seconds: time.sleep(INTERVAL if seconds > INTERVAL else min(seconds, LOCAL)),
    )


def tell_of_tasks(module: Any, tell: Callable[[], object]) -> None:
    """Let the SuperNode call `tell` when a message is here and has to be answered.

    Raises:
        UserError: this Flower has no function that waits for an answer.
    """
    answer = SUPERNODE.checked(module)._push_messages

    def told(*args: Any, **options: Any) -> Any:
        tell()
        return answer(*args, **options)

    module._push_messages = told


def main() -> None:
    """`flower-supernode`, with its own arguments."""
    flower.require()
    flower_compat.retry_soon()
    module = SUPERNODE.load()
    look_more_often(module)
    tell_of_tasks(module, TaskWriter(os.environ).tell)
    flower_compat.flower_supernode()


if __name__ == "__main__":
    main()
