"""Thirteen attacks on every TCP port that a job's processes listen on; the kernel says which those
are."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from allhands import wire
from allhands.wire.proof import GREETING, introduction

IDLE = 500
# Gloo keeps a stranger's connection open for ever, which is not ours to mend; so its ports get
# fewer.
IDLE_OF_TORCH = 10
# The ranks add numbers, over gloo and over Horovod's coordinator, until they are told to stop.
JOB = """
import sys, time
from pathlib import Path
import torch
import allhands.horovod.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
rank, size, step, over = hvd.rank(), hvd.size(), 0, False
while not over:
    step += 1
    words = [float(step * (1 + rank)), float((folder / "stop").exists())]
    found = torch.tensor(words, dtype=torch.float64)
    total, stop = hvd.allreduce(found, op=hvd.Sum, name=f"step {step % 7}").tolist()
    assert total == step * size * (size + 1) / 2, (step, total)
    over = stop > 0
    (folder / f"ready-{rank}").touch()
    time.sleep(0.01)
print(f"rank {rank} is right", flush=True)
"""


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def open_ports(roots: list[psutil.Process]) -> dict[int, int]:
    """The TCP ports on which these processes and their children listen, and who listens."""
    found = {}
    for process in family(roots):
        with contextlib.suppress(psutil.Error):
            for link in process.net_connections(kind="tcp"):
                if link.status == psutil.CONN_LISTEN:
                    found[link.laddr.port] = process.pid
    return found


def family(roots: list[psutil.Process]) -> list[psutil.Process]:
    """These processes and their children."""
    found = []
    for root in roots:
        with contextlib.suppress(psutil.Error):
            found += [root, *root.children(recursive=True)]
    return found


def speaks_first(port: int) -> bool:
    """Whether this is a listener of `allhands.wire`, and not one of torch or gloo."""
    with socket.create_connection(("127.0.0.1", port), 2.0) as link, contextlib.suppress(OSError):
        link.settimeout(1.0)
        return link.recv(len(GREETING)) == GREETING
    return False


class Attacks:
    """What strangers send to one port of this host."""

    def __init__(self, port: int, draw: random.Random, bomb: Path) -> None:
        self.port, self.draw, self.ours = port, draw, speaks_first(port)
        self.bomb = pickle.dumps(_Bomb(bomb))
        self.all: list[Callable[[], None]] = [
            self.garbage,
            self.deep_json,
            self.endless_json,
            self.half_handshake,
            self.huge_lengths,
            self.a_byte_at_a_time,
            self.idle,
            self.replay,
            self.wrong_token,
            self.a_pickle,
            self.connect_and_close,
            self.a_rank,
            self.tls,
        ]

    def run(self) -> None:
        """Each of them once, in any order."""
        for attack in self.draw.sample(self.all, len(self.all)):
            # The listener may hang up at any time.
            with contextlib.suppress(OSError, EOFError, wire.RefusedError):
                attack()

    def knock(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 2.0)

    def say(self, *said: bytes) -> None:
        with self.knock() as link:
            for piece in said:
                link.sendall(piece)
            link.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                while link.recv(4096):
                    pass

    def garbage(self) -> None:
        self.say(self.draw.randbytes(5000))

    def deep_json(self) -> None:
        self.say(b"[" * 100_000 + b"\n")

    def endless_json(self) -> None:
        self.say(b'{"rank": "', *[b"x" * 100_000] * 20)

    def half_handshake(self) -> None:
        self.say(GREETING + bytes(self.draw.randrange(60)))

    def huge_lengths(self) -> None:
        self.say(GREETING + bytes(64) + struct.pack("<I", 2**32 - 1), b"\xff" * 64)

    def a_byte_at_a_time(self) -> None:
        with self.knock() as link:
            for byte in GREETING[:8]:
                link.sendall(bytes([byte]))
                time.sleep(0.05)

    def idle(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(IDLE if self.ours else IDLE_OF_TORCH):
                stack.enter_context(self.knock())
            time.sleep(0.2)

    def replay(self) -> None:
        said = introduction(b"another time", bytes(32), bytes(32), b'{"rank": 1}')
        self.say(said, said)

    def wrong_token(self) -> None:
        with self.knock() as link:
            wire.introduce(link, self.draw.randbytes(32), {"rank": 1, "name": "a stranger"}, 2.0)
            raise AssertionError("a wrong token was taken")

    def a_pickle(self) -> None:
        self.say(self.bomb)

    def connect_and_close(self) -> None:
        self.knock().close()

    def a_rank(self) -> None:
        self.say(
            b'{"rank": 1, "name": "x"}\n{"failed": "planted"}\n',
            b'{"rank": 1, "token": ""}\n{"leave": []}\n',
        )

    def tls(self) -> None:
        self.say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.draw.randbytes(600))


@contextlib.contextmanager
def world(folder: Path, kind: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A job of two ranks: "srun" or "launch", the latter with a parameter server."""
    (folder / "job.py").write_text(JOB)
    words = [sys.executable, str(folder / "job.py"), str(folder)]
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_"))
    }
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if kind == "launch":
        program = str(Path(sys.executable).with_name("allhands"))
        words = [program, "launch", "-n", "2", "-s", "1", *words[1:]]
        started = [({}, words)]
    else:
        step = {
            "SLURM_JOB_ID": f"attacked{os.getpid()}",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_UID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NODEID": "0",
        }
        started = [
            (step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, words)
            for rank in range(2)
        ]
    processes = []
    try:
        for extra, command in started:
            files = [(folder / f"{name}-{len(processes)}").open("w") for name in ("out", "err")]
            processes.append(
                subprocess.Popen(
                    command,
                    env=clean | extra,
                    stdout=files[0],
                    stderr=files[1],
                    text=True,
                    cwd=folder,
                )
            )
            for file in files:
                file.close()
        yield processes
    finally:
        for process in family([psutil.Process(one.pid) for one in processes if one.poll() is None]):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for one in processes:
            one.wait()


def attacked(folder: Path, kind: str, seconds: float, seed: int) -> list[str]:
    """Attack a job for so long, at least each port once; what is not as it should be."""
    draw, bomb = random.Random(seed), folder / "executed"
    with world(folder, kind) as started:
        roots = [psutil.Process(one.pid) for one in started]
        end = time.monotonic() + 240.0
        while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
            if time.monotonic() > end or any(one.poll() is not None for one in started):
                return [f"the job did not start: {texts(folder, 'err')}"]
            time.sleep(0.1)
        before = {one.pid: (one.memory_info().rss, one.num_fds()) for one in family(roots)}
        ports = open_ports(roots)
        mob = [Attacks(port, draw, bomb) for port in ports]
        end = time.monotonic() + seconds
        while True:
            for attacks in mob:
                attacks.run()
            if time.monotonic() > end or any(one.poll() is not None for one in started):
                break
        time.sleep(1.5)  # for the last lines
        wrong = []
        for one in family(roots):
            if one.pid in before:
                grown = one.memory_info().rss - before[one.pid][0]
                files = one.num_fds() - before[one.pid][1]
                if grown > 64 << 20 or files > 200:
                    wrong.append(
                        f"process {one.pid} has {grown >> 20} MiB and {files} descriptors more: "
                        f"{one.cmdline()}"
                    )
        (folder / "stop").touch()
        for one in started:
            try:
                one.wait(60.0)
            except subprocess.TimeoutExpired:
                wrong.append("the job did not end")
    said, told = texts(folder, "out"), texts(folder, "err")
    ours = sum(attacks.ours for attacks in mob)
    named = told.count("refused a connection from 127.0.0.1:")
    print(f"{kind}: {len(ports)} ports, {ours} of the wire; lines that name a stranger: {named}")
    checks = {
        "no port of the wire was found": ours > 0,
        "the job's result is not right": all(f"rank {rank} is right" in said for rank in range(2)),
        "the job failed": all(one.returncode == 0 for one in started),
        "no stranger was named": named > 0,
        "a rank was blamed": "failed first" not in told,
        "a pickle was executed": not bomb.exists(),
    }
    wrong += [what for what, fine in checks.items() if not fine]
    return [*wrong, str([one.returncode for one in started]), said, told[-3000:]] if wrong else []


def texts(folder: Path, name: str) -> str:
    """What all processes of a job have printed."""
    return "".join(path.read_text() for path in sorted(folder.glob(f"{name}-*")))
