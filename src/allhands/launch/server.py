"""A parameter-server process: makes itself known to the workers, and serves until the launcher ends it.

`allhands launch -s 2` starts two of them beside the workers, one a host in turn. Server i puts its host's name and its process
number into the job's store under ``allhands/server/i``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from datetime import timedelta


def key(number: int) -> str:
    """Under which key of the job's store server `number` makes itself known."""
    return f"allhands/server/{number}"


def main() -> None:
    """Announce this server and wait; SIGTERM, which ends it, comes when the last worker has ended."""
    from torch.distributed import TCPStore

    number = int(os.environ["ALLHANDS_SERVER"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
    )
    store.set(key(number), json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
