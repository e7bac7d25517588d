"""What launcher, agent and workers say to one another: one JSON object a line, over pipes.

A pipe needs no port and no secret, reaches an agent on another host unchanged (ssh carries its
standard streams), and its end is the one signal of a peer's death that even SIGKILL cannot
suppress.

Launcher to agent, field `op`:

    prepare  env, cwd, parent, local_workers, threads, preload, launcher_timeout  -> `ready`
    store    address ("": all addresses of the host)     -> `store`
    reach    addresses, port                             -> `reached`
    ping                                                 the launcher is alive; to other hosts
    start    workers, heartbeat_timeout, scratch, hold   -> `started`, …, `idle`; hold: after `stop`
    again    worker                                      -> `started`; one that has ended
    kill     rank                                        SIGKILL, while the round goes on
    stop     ranks (null: all), grace                    SIGTERM, and SIGKILL after `grace` seconds
    signal   number                                      the workers get it
    quit                                                 the agent ends

Agent to launcher, field `event`: `ready`, `store`, `reached`, `started`, `begun` (a worker runs the
user's code), `out` (whole lines of output), `raised`, `leaving`, `returned`, `message` (what worker
code sent), `silent`, `passed` (the workers have got the signal `number`), `asked` (the agent itself
got the signal `number`, while no worker could take it), `exit`, `idle` (no process of the round is
left), `alive`. Times are `age`: seconds between the thing and its sending, because clocks of two
hosts cannot be compared.
"""

from __future__ import annotations

import os

CHUNK = 1 << 18

# Marks a process that our agent started (see `worker.active`), and is inherited by its children.
MARK = "ALLHANDS_LAUNCH"


def text_of(data: bytes) -> str:
    """Bytes of any encoding as text that JSON can carry and `bytes_of` turns back exactly."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """The bytes that `text_of` was given. Surrogates that no bytes decode to become `?`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor.

    Raises:
        OSError: the reader is gone (EPIPE), or the descriptor is closed.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
