"""Attack a parameter server for a while, from outside and with the job's token, while an honest
worker trains through it; then every port of a job under srun and of one under `allhands launch`, as
`tests/wire/attacks.py` does for seconds.

    python benchmarks/soak_wire.py [SECONDS] [--seed N] [--attackers 4]

The server is a process of its own, as `allhands launch -s 1` starts it. Strangers send random
bytes, pickles, frames without a handshake, handshakes with another token, replayed and cut ones, or
nothing; peers that know the token send damaged handshakes and, after a right one, truncated, huge
and random frames. In the end, and with exit code 1 where it is not so:

* the server is up, and takes a new worker within a second;
* its memory (resident now, not the peak) has grown by less than GROWTH since the first seconds, and
  it has few threads and descriptors, but for connections whose other half never came, which it
  keeps for half a minute;
* the honest worker's weights are, bit for bit, those of a hand-written loop;
* no pickle was executed, and no handshake without the token was answered.

The seed decides what is sent; how attacks and steps interleave is the machine's affair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from allhands.kvstore import Trainer, credentials
from allhands.kvstore.rules import rules_of
from allhands.kvstore.served import ServedStore
from allhands.kvstore.store_modes import mode_named
from allhands.kvstore.wire_frames import Kind, message, pack, read_into
from allhands.wire import RefusedError, introduce
from allhands.wire.proof import GREETING, introduction

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.wire.attacks import attacked

GROWTH = 32 << 20  # bytes
WARM_UP = 5.0  # seconds after which growth counts: until then threads, buffers and imports settle
BATCH, WIDTH = (
    8,
    300,
)  # a power of two, so that dividing by it and multiplying by its inverse round alike
# Those of the peers with the token; the honest worker's are 0, and 1 in the end.
STORES = range(100, 116)
PEER = {"rank": 0, "life": "bad", "host": "h", "pid": 1, "maps": False}


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Attacker:
    """One thread that knocks on the server's sockets, in an order that the seed decides."""

    def __init__(self, seed: str, where: dict[str, Any], token: bytes, bomb: str) -> None:
        self.draw, self.where, self.token = random.Random(seed), where, token
        self.bomb = pickle.dumps(_Bomb(bomb))
        self.counts: Counter[str] = Counter()
        self.accepted = 0  # handshakes that should have been refused
        self.refused_peers = 0  # handshakes with the token that failed
        self.halves: list[float] = []  # when a connection was left without its other half
        self._silent: list[socket.socket] = []
        self.attacks: list[Callable[[], None]] = [
            self.random_bytes,
            self.pickles,
            self.bare_frames,
            self.wrong_token,
            self.replayed,
            self.cut,
            self.silent,
            self.damaged_introduction,
            self.truncated_frame,
            self.huge_frame,
            self.random_frames,
            self.damaged_message,
        ]

    def run(self, end: float) -> None:
        while time.monotonic() < end:
            attack = self.draw.choice(self.attacks)
            # The server may close a connection at any time, and may take none for a moment.
            with contextlib.suppress(OSError, EOFError):
                attack()
            self.counts[attack.__name__.replace("_", " ")] += 1
            time.sleep(0.002)  # the honest worker shares the cores
        for link in self._silent:
            link.close()

    def knock(self) -> socket.socket:
        if self.draw.random() < 0.3:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.connect("\0" + self.where["unix"])
        else:
            link = socket.create_connection((self.where["address"], self.where["port"]))
        link.settimeout(5.0)
        return link

    def noise(self, most: int) -> bytes:
        return self.draw.randbytes(self.draw.randrange(1, most))

    # ------------------------------------------------------------------ without the token

    def say(self, data: bytes) -> None:
        with self.knock() as link:
            link.sendall(data)
            self.unanswered(link)

    def unanswered(self, link: socket.socket) -> None:
        """Count it where the server takes this connection for one of its job: it proves that it
        knows the token, too."""
        link.shutdown(socket.SHUT_WR)
        heard = b""
        while part := link.recv(4096):
            heard += part
        if any(heard[len(GREETING) + 32 :]):  # a refusal is zeros
            self.accepted += 1

    def random_bytes(self) -> None:
        self.say(self.noise(20_000))

    def pickles(self) -> None:
        self.say(
            self.draw.choice(
                [b"", GREETING, GREETING + bytes(64) + struct.pack("<I", len(self.bomb))]
            )
            + self.bomb
        )

    def bare_frames(self) -> None:
        self.say(
            pack(
                self.draw.choice(list(Kind)),
                0,
                0,
                0,
                1,
                self.draw.choice([0, 1 << 20, (1 << 64) - 1]),
            )
            + self.noise(500)
        )

    def wrong_token(self) -> None:
        with self.knock() as link:
            try:
                introduce(
                    link,
                    self.draw.randbytes(64),
                    PEER | {"session": "s", "side": "up", "store": 0, "rules": {}},
                )
            except (RefusedError, OSError, EOFError):
                return
            self.accepted += 1

    def replayed(self) -> None:
        """What a peer with the token once said, byte for byte, to a server that now asks for
        another answer."""
        said = self.introduction({"session": f"{self.draw.random()}", "side": "up"}, bytes(32))
        self.say(said)

    def cut(self) -> None:
        with self.knock() as link:
            said = self.introduction(self.peer(), self.challenge(link))
            link.sendall(said[: self.draw.randrange(len(said))])
            self.unanswered(link)

    def silent(self) -> None:
        """Up to four connections that say nothing, of the 64 that a server bears from one address
        without a proof."""
        self._silent.append(self.knock())
        if len(self._silent) > 4:
            self._silent.pop(0).close()

    # ------------------------------------------------------------------ with the token

    def peer(self) -> dict[str, Any]:
        rules = rules_of(
            mode_named("dist"), {"on_worker_loss": self.draw.choice(["stop", "continue"])}
        )
        return PEER | {
            "store": self.draw.choice(STORES),
            "rules": rules,
            "session": f"{self.draw.random()}",
            "side": "up",
        }

    def challenge(self, link: socket.socket) -> bytes:
        head = bytearray(len(GREETING) + 32)
        read_into(link, memoryview(head))
        return bytes(head[len(GREETING) :])

    def introduction(self, said: dict[str, Any] | bytes, challenge: bytes) -> bytes:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        nonce = self.draw.randbytes(32)
        return introduction(self.token, challenge, nonce, body)

    def damaged_introduction(self) -> None:
        said: Any = self.peer()
        match self.draw.randrange(4):
            case 0:
                said = self.noise(3000)
            case 1:
                said = b"[" * 4000
            case 2:
                del said[self.draw.choice(sorted(said))]
            case 3:
                field = self.draw.choice(["rules", "session", "side", "rank", "life"])
                said[field] = self.draw.choice(
                    [None, -1, 1 << 70, "x" * 2000, [], {"wait": "sync"}]
                )
        with self.knock() as link:
            link.sendall(self.introduction(said, self.challenge(link)))
            link.settimeout(0.1)
            try:
                while link.recv(4096):
                    pass
            # it was right as far as one connection goes, and is kept for a while until the other
            # comes
            except TimeoutError:
                self.halves.append(time.monotonic())

    def as_worker(self, data: bytes) -> None:
        """Send something after two right handshakes."""
        said = self.peer()
        with self.knock() as up, self.knock() as down:
            try:
                introduce(up, self.token, said)
                introduce(down, self.token, said | {"side": "down"})
            except RefusedError:
                self.refused_peers += 1
                return
            up.sendall(data)
            up.shutdown(socket.SHUT_WR)
            down.settimeout(5.0)
            while down.recv(4096):
                pass

    def truncated_frame(self) -> None:
        declared = message({"op": "declare", "id": 1, "keys": [], "complete": False})
        frames = [
            declared,
            pack(Kind.PUSH, 0, 0, 1, 1, 1000) + bytes(999),
            pack(Kind.STATE, nbytes=5000) + self.bomb,
        ]
        frame = self.draw.choice(frames)
        self.as_worker(frame[: self.draw.randrange(len(frame))])

    def huge_frame(self) -> None:
        """A header that promises up to 2^64 bytes, and little after it."""
        kind = self.draw.choice(list(Kind))
        self.as_worker(
            pack(kind, 0, 0, 0, 1, 1 << self.draw.randrange(20, 64)) + self.noise(100_000)
        )

    def random_frames(self) -> None:
        frames = [
            pack(
                kind,
                self.draw.randrange(16),
                self.draw.randrange(3),
                self.draw.randrange(3),
                self.draw.getrandbits(64),
                len(body),
            )
            + body
            for kind in self.draw.choices(list(Kind), k=5)
            for body in [self.draw.choice([self.bomb, self.noise(300)])]
        ]
        self.as_worker(b"".join(frames))

    def damaged_message(self) -> None:
        ops = (
            "declare create ready region block optimizer compression step commit barrier "
            "join state back bye none"
        )
        fields = [
            "keys",
            "chunks",
            "forms",
            "name",
            "groups",
            "push",
            "pull",
            "step",
            "weight",
            "begins",
            "nbytes",
            "scale",
        ]
        values: list[Any] = [None, -1, 1 << 70, "x", [], [[]], {}, {"a": {}}, 1e308, True]
        said = {"op": self.draw.choice(ops.split()), "id": self.draw.randrange(9)}
        said |= {name: self.draw.choice(values) for name in self.draw.sample(fields, 6)}
        self.as_worker(message(said))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(
        BATCH, 2, generator=generator
    )


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, 2)


def train(store: ServedStore, end: float) -> tuple[torch.nn.Module, int, float]:
    """The honest worker: its model, the number of steps, and how long the longest took."""
    ours, steps, longest = net(), 0, 0.0
    trainer = Trainer(ours, "sgd", {"learning_rate": 1e-3, "momentum": 0.9}, kvstore=store)
    while time.monotonic() < end:
        X, Y = batch(steps)
        began = time.monotonic()
        torch.nn.functional.mse_loss(ours(X), Y, reduction="sum").backward()
        trainer.step(BATCH)
        steps, longest = steps + 1, max(longest, time.monotonic() - began)
        time.sleep(0.005)
    return ours, steps, longest


def by_hand(steps: int) -> torch.nn.Module:
    theirs = net()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9)
    for step in range(steps):
        X, Y = batch(step)
        optimizer.zero_grad()
        (torch.nn.functional.mse_loss(theirs(X), Y, reduction="sum") / BATCH).backward()
        optimizer.step()
    return theirs


def resident(pid: int) -> int:
    """Bytes of memory that a process has now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def threads_and_files(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def started(token: str, meeting: TCPStore) -> subprocess.Popen[bytes]:
    """A server, with the variables that the launcher gives it."""
    env = os.environ | {
        "ALLHANDS_SERVER": "0",
        "ALLHANDS_NUM_SERVERS": "1",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.port),
        "ALLHANDS_KVSTORE_TOKEN": token,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "allhands.kvstore.parameter_server"], env=env)


def soak(seconds: float, seed: int, attackers: int, folder: str) -> list[str]:
    """Attack; print the figures; what is not as it should be."""
    token = secrets.token_hex(32)
    os.environ |= {"ALLHANDS_KVSTORE_TOKEN": token, "ALLHANDS_KVSTORE_TRANSPORT": "tcp"}
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = started(token, meeting)
    try:
        where = json.loads(meeting.get(credentials.key(0)))
        mode = mode_named("dist")
        rules = rules_of(mode, {})
        store = ServedStore(mode, 0, 1, [where], rules, 0, "honest", "tcp")
        bomb = str(Path(folder, "executed"))
        begin = time.monotonic()
        end = begin + seconds
        mob = [
            Attacker(f"{seed}-{number}", where, token.encode(), bomb) for number in range(attackers)
        ]
        threads = [threading.Thread(target=one.run, args=(end,), daemon=True) for one in mob]
        seen: list[tuple[float, int]] = []

        def watch() -> None:
            while (now := time.monotonic()) < end and server.poll() is None:
                seen.append((now - begin, resident(server.pid)))
                time.sleep(0.2)

        for thread in (*threads, watcher := threading.Thread(target=watch, daemon=True)):
            thread.start()
        ours, steps, longest = train(store, end)
        for thread in (*threads, watcher):
            thread.join(30.0)
        if server.poll() is not None:
            return [f"the server has ended with exit code {server.returncode}"]
        began = time.monotonic()
        other = ServedStore(mode, 0, 1, [where], rules, 1, "honest", "tcp")
        other.init("a", torch.zeros(3))
        other.pushpull("a", torch.ones(3), out := torch.empty(3))
        new = time.monotonic() - began
        other.close()
        time.sleep(1.5)  # what was told why it is refused is closed a second later
        count, files = threads_and_files(server.pid)
        last = resident(server.pid)
        store.close()
    finally:
        server.terminate()
        try:
            server.wait(10.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    return judged(
        mob,
        seen,
        last,
        (count, files),
        (ours, steps, longest),
        (new, out),
        os.path.exists(bomb),
        min(WARM_UP, seconds / 2),
    )


def judged(
    mob: list[Attacker],
    seen: list[tuple[float, int]],
    last: int,
    left: tuple[int, int],
    trained: tuple[torch.nn.Module, int, float],
    new: tuple[float, torch.Tensor],
    executed: bool,
    warm_up: float,
) -> list[str]:
    """Print the figures; what is not as it should be."""
    counts = sum((one.counts for one in mob), Counter[str]())
    first = next(size for at, size in seen if at >= warm_up)
    peak = max(size for _, size in seen)
    (ours, steps, longest), (count, files) = trained, left
    halves = sum(at > time.monotonic() - 35.0 for one in mob for at in one.halves)
    theirs = by_hand(steps)
    same = all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    accepted, refused = sum(one.accepted for one in mob), sum(one.refused_peers for one in mob)
    print(
        f"{sum(counts.values())} attacks: "
        + ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    )
    print(
        f"memory of the server: {first / 1e6:.1f} MB after {warm_up:.0f} s, {peak / 1e6:.1f} at "
        f"most, {last / 1e6:.1f} in the end"
    )
    print(
        f"the server has {count} threads and {files} descriptors in the end, of which {halves} may "
        "be halves of connections"
    )
    print(
        f"the honest worker took {steps} steps, the longest in {longest:.2f} s; equal to the loop "
        f"by hand: {same}"
    )
    print(
        f"a new worker was served in {new[0]:.2f} s; handshakes without the token that were "
        f"answered: {accepted}; with it, and refused: {refused}; executed: {executed}"
    )
    checks = {
        "no step was taken": steps > 0,
        "the weights are not those of the loop by hand": same,
        f"the server's memory grew by {(last - first) / 1e6:.1f} MB": last - first < GROWTH,
        f"{count} threads and {files} descriptors were left": count < 40 and files < 60 + halves,
        "a new worker was not served": new[0] < 1.0 and new[1].tolist() == [1.0] * 3,
        "a handshake without the token was answered": accepted == 0,
        "a peer with the token was refused": refused == 0,
        "a pickle was executed": not executed,
        "an attack was never tried": len(counts) == len(mob[0].attacks),
    }
    return [what for what, fine in checks.items() if not fine]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="attack a parameter server while an honest worker trains through it"
    )
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of what is sent; without it another one each time"
    )
    parser.add_argument("--attackers", type=int, default=4, help="threads that attack")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    torch.set_num_threads(1)
    print(f"seed {seed}, {options.seconds:g} s, {options.attackers} attackers", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(options.seconds, seed, options.attackers, folder)
    for kind in ("srun", "launch"):
        with tempfile.TemporaryDirectory() as folder:
            wrong += attacked(Path(folder), kind, options.seconds / 2, seed)
    for what in wrong:
        print(f"soak: FAILED: {what}")
    print("soak: " + ("FAILED" if wrong else "passed"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
