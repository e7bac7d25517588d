"""Programs of the launcher's workers that fail in the midst of a training, and the same by hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from tests.kvstore import losing
from tests.launch.conftest import Job, wait_until
from tests.patience import patience

LEASE = 2.0
WITHIN = LEASE + 1.0
HOST = os.uname().nodename
SIZES = {"a": 1000, "b": 40_000}

# What all programs begin with: a training by gradients that the servers add up, and ways to fail in
# the midst of it.
BEGIN = """
import atexit, json, os, signal, sys, time
from pathlib import Path
import torch
from allhands import kvstore as kv
from allhands.errors import WorldError
from allhands.kvstore.wire_frames import Kind, pack
torch.set_num_threads(1)
SIZES = {"a": 1000, "b": 40_000}


def joined(store, optimizer=False):
    # An optimizer on the servers takes seconds the first time: torch then imports its compiler.
    first = {name: torch.arange(count, dtype=torch.float32) for name, count in SIZES.items()}
    if optimizer:
        store.set_optimizer("sgd", lr=0.5)
    store.declare(first, complete=True)
    return first


def grads(rank, step):
    more = float((rank + 1) * (step + 1))
    return {name: torch.arange(count) % 7 + more for name, count in SIZES.items()}


def update(store, weights, step):
    mine, share = grads(store.rank, step), kv.Share(1.0 + store.rank, 1.0)
    if store.optimizer is not None:
        return store.update(mine, weights, share)
    taken = store.reduce(mine, share)
    for name, grad in mine.items():
        weights[name] -= 0.5 * grad
    return taken


def note(name, value):
    path = Path(f"{name}.part")
    path.write_text(json.dumps(value))
    path.rename(name)


def fail(name, how):
    note(name, time.monotonic())
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "exception":
        raise ValueError("planted")
    else:
        sys.exit(3)


def fail_at(store, step, when, how, name):
    if when == "mid-chunk":
        _, meta, involved = store._begin(list(SIZES), kv.Share(1.0 + store.rank, 1.0), None, None)
        store._settle()
        for link in involved:
            piece = next(piece for piece in store._pieces["b"] if piece.server == link.number)
            nbytes = 4 * (piece.stop - piece.start)
            head = pack(Kind.PUSH, 0, piece.number, meta, step + 1, nbytes)
            link._up.sendall(head + bytes(nbytes // 2))
    elif when == "after push":
        store._send(grads(store.rank, step), None, kv.Share(1.0 + store.rank, 1.0))
        store._settle()
    elif when == "in a barrier":
        signal.signal(signal.SIGALRM, lambda *_: fail(name, how))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        store.barrier()
        return
    elif when == "at exit" and how != "exception":
        atexit.register(fail, name, how)  # runs before the store says goodbye
        return
    fail(name, how)
"""


def launched(job: Job, text: str, *words: str, argument: str = "{}") -> tuple[int, str, list[str]]:
    """Exit code, output, and what the launcher reported; nothing is left five seconds later."""
    code, out, err = job.run(*words, job.script(BEGIN + text), argument, timeout=patience(90))
    assert wait_until(lambda: not job.alive(), 5), f"left behind: {job.alive()}"
    told = [
        re.sub(r"pid \d+", "PID", line)
        for line in err.splitlines()
        if line.startswith("allhands: ")
    ]
    return code, out + err, told


def reference(took_part: list[set[int]]) -> dict[str, torch.Tensor]:
    """The same training by hand; who was in each step."""
    return losing.reference(took_part, sizes=SIZES, shares=[1.0 + rank for rank in range(7)])


def same(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = torch.load(path)
    return all(torch.equal(found[name], value) for name, value in expected.items())
