"""What `allhands launch --launcher mpi` starts as a rank: ``python -m allhands.launch.mpi_rank
script train.py …``, or ``module NAME …``.

It runs as ``python train.py …`` would, and ``init_process_group(backend="mpi")`` works there
without an import of allhands.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

from allhands import torch_hook
from allhands.launch import worker
from allhands.world.detection import detect


def main(kind: str, target: str, args: list[str]) -> None:
    """Run a script or a module in this process.

    Args:
        kind: "script" or "module".
        target: its path or name.
        args: its arguments.
    """
    torch_hook.install()
    if os.environ.get("ALLHANDS_NUM_SERVERS"):
        _tell_who()
    sys.excepthook = _without_frames_of_ours(sys.excepthook)
    if kind == "module":
        sys.argv = [target, *args]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        del sys.path[0]  # that of `python -m`
    worker.run_script(target, args)


def _tell_who() -> None:
    """Set the variables by which a worker that meets its servers knows its number."""
    layout = detect()
    if layout is None:
        return  # not started by MPI
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(layout.rank), str(layout.world_size)
    if layout.local_rank is not None:
        os.environ["LOCAL_RANK"] = str(layout.local_rank)
    if layout.local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(layout.local_world_size)


def _without_frames_of_ours(hook: Callable[..., Any]) -> Callable[..., None]:
    """An excepthook whose traceback begins with the user's code, as plain Python's does."""
    files = (__file__, worker.__file__, "<frozen runpy>")

    def shorter(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in files:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return shorter


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
