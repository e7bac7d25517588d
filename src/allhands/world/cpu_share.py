"""This process's part of the processor cores, beside other processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from allhands.world.cores import usable as usable_cores
from allhands.world.environments.slurm import cpus_of_task
from allhands.world.layout import Environ
from allhands.world.membership import Member

# Each says how many threads torch computes with, when it is loaded.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def share_of(members: Sequence[Member], rank: int) -> float:
    """The cores that fall to one process, where all processes of its host share evenly what they
    may use.

    A launcher that binds each process to cores of its own leaves them to it.
    """
    neighbours = [member for member in members if member.host == members[rank].host]
    users = Counter(core for member in neighbours for core in _bits(member.cores))
    return sum(1 / users[core] for core in _bits(members[rank].cores))


def limit_threads(
    members: Sequence[Member], rank: int, environ: Environ
) -> Callable[[], None] | None:
    """Let torch compute with no more threads than this process has cores for.

    More threads than cores wait for one another actively, and each step takes several times as
    long. A number that the user has set, by OMP_NUM_THREADS, MKL_NUM_THREADS or
    ``torch.set_num_threads``, stays.

    Returns:
        What gives torch back its threads; None where nothing was changed.
    """
    import torch

    before, usable = torch.get_num_threads(), usable_cores()
    if any(environ.get(name) for name in _VARIABLES):
        return None
    if before not in (len(usable), _physical(usable)):
        return None
    part, told = share_of(members, rank), cpus_of_task(environ)
    if told is not None:
        part = min(part, told)
    # Where torch has one thread for two hardware threads, so has the part.
    threads = max(1, int(before * part / len(usable) + 1e-6))
    if threads >= before:
        return None
    torch.set_num_threads(threads)

    def restore() -> None:
        if torch.get_num_threads() == threads:
            torch.set_num_threads(before)

    return restore


def _physical(usable: set[int]) -> int:
    """Cores without their further hardware threads."""
    siblings = set()
    for core in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        text = str(core)
        with contextlib.suppress(OSError):
            text = path.read_text().strip()
        siblings.add(text)
    return len(siblings)


def _bits(mask: str) -> list[int]:
    number = int(mask or "0", 16)
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]
