"""A real all-reduce over the hosts, started and looked after like any job: do the sums come out
right, and how fast?

The workers run this file as a module; `measure` starts them.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from allhands.errors import AllhandsError
from allhands.launch.job import Job
from allhands.launch.job_nodes import Host
from allhands.launch.options import Options
from allhands.launch.plan import Command

SIZES = (4 << 10, 1 << 20, 32 << 20)  # bytes
# Of each size: at least one more after the first, and as many as fit into so many seconds.
EACH_S = 0.4
MOST = 50
# A slow network gets less than the largest size rather than more time.
LONGEST_S = 2.0
GROUP_TIMEOUT_S = 15.0
WHOLE_S = 30.0
# With all kinds of collectives.
WHOLE_OF_KINDS_S = 120.0


def measure(
    hosts: Sequence[Host], slots: Sequence[int], device: str = "auto", kinds: bool = False
) -> tuple[dict[str, Any] | None, str]:
    """Run it.

    Args:
        hosts: where.
        slots: how many workers on each of them.
        device: "cpu", or "auto" for a GPU each where there are any.
        kinds: measure collectives of other kinds too.

    Returns:
        What rank 0 measured (`backend`; `sizes` with `bytes`, `seconds`; `kinds`, see
        `allhands.doctor.collective_times`) and "", or None and what went wrong.
    """
    longest = WHOLE_OF_KINDS_S if kinds else WHOLE_S
    options = Options(
        workers=sum(slots), cwd="/", prefix=True, grace=1.0, heartbeat_timeout=longest
    )
    told: dict[int, dict[str, Any]] = {}
    said = io.StringIO()
    timed_out = threading.Event()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        job = Job(
            Command("module", "allhands.doctor.allreduce", (device, str(int(kinds)))),
            hosts,
            options,
            slots,
        )
        job.supervisor.on_message = told.__setitem__

        def give_up() -> None:
            timed_out.set()
            job.supervisor.interrupt(signal.SIGINT)

        timer = threading.Timer(longest, give_up)
        timer.daemon = True
        timer.start()
        try:
            code = job.run()
        except AllhandsError as error:
            return None, str(error)
        finally:
            timer.cancel()
    if timed_out.is_set():
        return None, f"it did not end within {longest:.0f} s"
    if job.supervisor.signals:
        raise KeyboardInterrupt  # Ctrl-C, or the like, was for the doctor
    if code:
        return None, _failure(said.getvalue())
    wrong = [
        f"rank {rank} ({job.supervisor.workers[rank].host})"
        for rank, one in sorted(told.items())
        if not one["correct"]
    ]
    if wrong:
        return None, f"wrong sums on {', '.join(wrong)}"
    return told[0], ""


def _failure(text: str) -> str:
    """The report of the failure, without what the workers printed before."""
    return text[text.rfind("allhands: rank") :].removeprefix("allhands: ").strip()


# ---------------------------------------------------------------------- in the workers


def work(device: str, kinds: bool) -> None:
    from allhands.doctor.collective_times import collective_times
    from allhands.launch import worker
    from allhands.world import finalize, init

    world = init(timeout=GROUP_TIMEOUT_S, device=device)
    try:
        correct, sizes = True, list[dict[str, Any]]()
        for wanted in SIZES:
            count = wanted
            if sizes:
                last, seconds = sizes[-1]["bytes"], sizes[-1]["seconds"]
                count = min(wanted, int(last * LONGEST_S / seconds) // 4 * 4)
                if count <= last:
                    break
            good, seconds = _one(count, world.device)
            correct = correct and good
            sizes.append({"bytes": count, "seconds": seconds})
        told = {"correct": correct, "backend": world.backend, "sizes": sizes}
        if kinds and correct and world.world_size > 1:
            told["kinds"] = collective_times(world)
        worker.send(told)
    finally:
        finalize()


def _one(count: int, device: Any) -> tuple[bool, float]:
    """All-reduce a tensor of `count` bytes: whether the sums are right, and the mean seconds on the
    slowest rank."""
    import torch
    import torch.distributed as dist

    ranks, own = dist.get_world_size(), dist.get_rank()
    pattern = torch.arange(count // 4, device=device, dtype=torch.float32) % 7
    tensor = pattern + own
    first = _seconds(lambda: dist.all_reduce(tensor), device)
    correct = torch.equal(tensor, ranks * pattern + ranks * (ranks - 1) // 2)
    # All ranks must repeat it equally often.
    slowest = torch.tensor([first], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    repeats = max(1, min(MOST, int(EACH_S / max(float(slowest), 1e-6))))
    tensor = torch.zeros_like(tensor)

    def several() -> None:
        for _ in range(repeats):
            dist.all_reduce(tensor)

    dist.barrier()
    mean = torch.tensor([_seconds(several, device) / repeats], device=device, dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return correct, float(mean)


def _seconds(action: Any, device: Any) -> float:
    import torch

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    began = time.perf_counter()
    action()
    settle()
    return time.perf_counter() - began


if __name__ == "__main__":
    work(sys.argv[1], kinds=sys.argv[2] == "1")
