"""The threads of PyTorch at the end of a process."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

# How long a process may wait for its threads as it ends, in seconds. Threads of the user's may
# compute for ever.
LONGEST_WAIT_S = 1.0

_FINALIZE_S = 10.0
_BEFORE_GROUP_S = 0.2

# Whether the interpreter is taken down when this process ends, as by the end of a script.
interpreter_ends = True

_log = logging.getLogger(__name__)
_TASKS = Path("/proc/self/task")


def wait_until_asleep(limit: float = LONGEST_WAIT_S) -> bool:
    """Wait until no other thread of this process runs, or wants to.

    A thread of gloo's frees the tensors of a collective after it has told the caller that it is
    over, and needs the interpreter's lock for that. Threads that sleep have nothing left to free.

    Args:
        limit: seconds after which it gives up.

    Returns:
        Whether all threads sleep, as far as it can be seen.
    """
    if not _TASKS.is_dir():
        return True
    deadline, calm = time.monotonic() + limit, 0
    while calm < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)  # a thread that waits for the interpreter has it meanwhile
        calm = calm + 1 if all(map(_sleeps, _TASKS.iterdir())) else 0
    return True


def _sleeps(task: Path) -> bool:
    if task.name == str(threading.get_native_id()):
        return True
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return True
    return state not in "RD"


def let_threads_end() -> None:
    """Wait for them before the interpreter is taken down, if it is.

    Python (before 3.14) ends a thread that needs the interpreter later in the middle of a
    destructor, and the process aborts: "terminate called without an active exception", exit code
    134.
    """
    if interpreter_ends and sys.version_info < (3, 14):
        wait_until_asleep()


def destroy_group(backend: str) -> None:
    """Destroy the default process group, within 10 s."""
    import torch.distributed as dist

    if backend != "nccl":
        # It joins gloo's threads with the interpreter's lock held, which one of them may wait for.
        wait_until_asleep(_BEFORE_GROUP_S)
        dist.destroy_process_group()
        return
    # nccl waits for what is still queued on the GPU, for ever when a peer has gone; a process that
    # leaves must not.
    worker = threading.Thread(
        target=dist.destroy_process_group, name="allhands-finalize", daemon=True
    )
    worker.start()
    worker.join(_FINALIZE_S)
    if worker.is_alive():
        _log.warning(
            "nccl did not stop within %.0f s, probably because a peer has gone; left as it is",
            _FINALIZE_S,
        )
