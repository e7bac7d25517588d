"""A call in a process of its own: a worker of a world cannot plan in its own one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def in_own_process(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What a function gives in a process that is in no world and sees no GPU.

    Args:
        function, args: as they can be pickled, those of a script among them.
        seconds: after which the process is ended.

    Raises:
        subprocess.SubprocessError: it has failed, or takes longer.
    """
    import cloudpickle

    world = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ALLHANDS_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(world)}
    done = subprocess.run(
        [sys.executable, "-m", "allhands.planning.own_process"],
        input=cloudpickle.dumps((function, args)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        timeout=seconds,
        check=True,
    )
    return pickle.loads(done.stdout)


def _answer() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no answer
    function, args = pickle.load(sys.stdin.buffer)
    pickle.dump(function(*args), out)
    out.close()


if __name__ == "__main__":
    _answer()
