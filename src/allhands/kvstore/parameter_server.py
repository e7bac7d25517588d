"""A parameter-server process: listens, lets in who knows the job's token, and serves until the
launcher ends it.

`allhands launch -s 2` starts two of them beside the workers, one a host in turn. Server i
says in the job's store, under ``allhands/server/i``, where it listens.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from allhands import wire
from allhands.errors import AllhandsError
from allhands.kvstore.credentials import key, tls_contexts, token_from
from allhands.kvstore.mirror import Find, Mirror
from allhands.kvstore.mirror_copy import Copy
from allhands.kvstore.shard import Shard
from allhands.kvstore.shard_recovery import ShardRecovery
from allhands.kvstore.snapshots import Snapshots
from allhands.kvstore.worker_session import WorkerSession
from allhands.world.interface import address_towards

LEASE = "ALLHANDS_KVSTORE_LEASE"
# Seconds without a sign of life after which a worker counts as lost. A worker gives one every
# second.
DEFAULT_LEASE = 10.0
START = "ALLHANDS_KVSTORE_START"
# Seconds after the first worker within which every other one must have come.
DEFAULT_START = 120.0


class ParameterServer:
    """Listens on one TCP port, and on a Unix socket for workers of this host.

    Args:
        number: which server of the job.
        servers: how many there are.
        workers: how many workers the job has.
        token: the job's.
        address: where to listen.
        lease: seconds of silence after which a worker is lost.
        restarted: the one before died; nothing is answered before the workers have chosen what all
            go on from.
        find: gives a server's present announcement, where servers mirror one another.
        start: seconds after a store's first worker after which one that has never come, to any
            store, is lost.

    Attributes:
        shards: this server's part of each store, by the number of the store.
        copies: copies of the part of the server before this one.
    """

    def __init__(
        self,
        number: int,
        servers: int,
        workers: int,
        token: bytes,
        address: str = "127.0.0.1",
        lease: float = DEFAULT_LEASE,
        restarted: bool = False,
        find: Find | None = None,
        start: float = DEFAULT_START,
    ) -> None:
        self.number, self.servers, self.workers = number, servers, workers
        self.lease, self.patience = lease, start
        self._came: set[int] = set()  # workers that have been here
        self._began: dict[int, float] = {}  # when each store's first worker came
        self.restarted = restarted
        self.shards: dict[int, Shard] = {}
        self.copies: dict[int, Copy] = {}
        self.find = find
        self._token = token
        listeners = [wire.listen(address)]
        self._name = listeners[0].getsockname()
        # A name in the abstract space leaves no file behind.
        self.unix_name: str | None = f"allhands-kvstore-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            listeners.append(wire.listen_unix(f"\0{self.unix_name}"))
        except OSError:  # a system without such names
            self.unix_name = None
        tls = tls_contexts(os.environ)
        self._acceptor = wire.Acceptor(
            f"parameter server {number}",
            listeners,
            token,
            self._welcome,
            None if tls is None else tls[0],
        )
        self._halves: dict[str, tuple[float, str, socket.socket]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._ending = threading.Event()

    def where(self) -> dict[str, Any]:
        """What workers must know to connect."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self._name[0],
            "port": self._name[1],
            "unix": self.unix_name,
            "life": secrets.token_hex(8),
        }

    def start(self) -> None:
        """Serve in threads of this process."""
        self._acceptor.start()
        threading.Thread(target=self._watch, name="leases", daemon=True).start()

    def close(self) -> None:
        """Stop to serve."""
        self._stopped = True
        self._ending.set()
        self._acceptor.close()
        sessions = [
            session
            for shard in list(self.shards.values())
            for session in shard.members.sessions_now()
        ]
        for session in sessions:
            session.mute()  # none of them is to hear that others are gone
        for session in sessions:
            session.end()
        # Only now: what is not copied any more must not be answered.
        for shard in list(self.shards.values()):
            if shard.mirror is not None:
                shard.mirror.close()
        for copy in list(self.copies.values()):
            copy.end()

    def _welcome(self, link: socket.socket, said: dict[str, Any]) -> None:
        # What follows may wait for other threads, and strangers must not wait for it.
        threading.Thread(target=self._meet, args=(link, said), name="meet", daemon=True).start()

    def _meet(self, link: socket.socket, said: dict[str, Any]) -> None:
        try:
            self._pair(link, said, link.family == socket.AF_UNIX)
        except Exception:  # whatever a peer says of itself, the others go on
            link.close()

    def _pair(self, link: socket.socket, said: dict[str, Any], local: bool) -> None:
        """A worker comes with two connections; when the second is there, it takes part."""
        name, side = str(said["session"]), said["side"]
        with self._lock:
            now = time.monotonic()
            for old in [old for old, (since, _, _) in self._halves.items() if now - since > 30.0]:
                self._halves.pop(old)[2].close()
            if name not in self._halves:
                self._halves[name] = (now, side, link)
                return
            _, other_side, other = self._halves.pop(name)
            if {side, other_side} != {"up", "down"}:
                raise wire.RefusedError("two connections of one direction")
            up, down = (link, other) if side == "up" else (other, link)
            copy = self._copy(said) if "mirror" in said else None
            shard = self._shard(said) if copy is None else None
        if copy is not None:
            number = int(said["store"])
            threading.Thread(
                target=copy.hold,
                args=(up, down, lambda: self._live(number)),
                name="copy",
                daemon=True,
            ).start()
            return
        assert shard is not None
        session = WorkerSession(
            shard,
            int(said["rank"]),
            up,
            down,
            f"host {said['host']}, process {said['pid']}",
            local and said["maps"],
        )
        session.life = str(said["life"])
        refusal = None
        if said["rules"] != shard.rules:
            refusal = (
                f"the store is {said['rules']} on worker {session.rank}, but {shard.rules} "
                "on another: create it alike on all"
            )
        elif not 0 <= session.rank < shard.workers:
            refusal = f"there is no worker {session.rank} among {shard.workers}"
        if shard.recovery is not None and shard.recovery.restored:
            session.occasion = shard.recovery.occasion
        if refusal is None:
            self._came.add(session.rank)
            before, session.again = shard.members.connect(session)
            if before is not None:
                # The same worker over a new connection, or started again before its loss was seen.
                if before.life != session.life:
                    session.again = True
                    shard.members.connect(before)
                    shard.gone(
                        before,
                        f"worker {session.rank} ({before.about}) was started again",
                        polite=True,
                    )
                    shard.members.connect(session)
                before.end()
        session.tell(
            {"op": "welcome", "again": session.again, "refused": refusal, "failed": shard.failure}
        )
        session.start()
        if refusal is not None:
            session.end_soon()

    def _shard(self, said: dict[str, Any]) -> Shard:
        """The part of the n-th store that the workers have created; made by the first worker's
        rules. `_lock` is held."""
        number = int(said["store"])
        if number not in self.shards:
            for old in [old for old, shard in self.shards.items() if not shard.members.everyone()]:
                self._forget(old)  # all have left it
            rules = said["rules"]
            checked: dict[str, Any] = {
                "wait": {"sync": "sync", "async": "async", "ssp": "ssp"}[rules["wait"]],
                "staleness": int(rules["staleness"]),
                "damping": bool(rules["damping"]),
                "on_worker_loss": {"stop": "stop", "continue": "continue"}[rules["on_worker_loss"]],
                "snapshot_every": int(rules["snapshot_every"]),
                "snapshot_dir": str(rules["snapshot_dir"]),
                "mirror": bool(rules["mirror"]),
            }
            shard = Shard(self.number, self.servers, self.workers, checked)
            snapshots = None
            if checked["snapshot_every"]:
                job = os.environ.get("TORCHELASTIC_RUN_ID", "local")
                snapshots = Snapshots(
                    checked["snapshot_dir"], job, number, self.number, checked["snapshot_every"]
                )
            if snapshots is not None or checked["mirror"]:
                shard.recovery = ShardRecovery(snapshots, self.restarted)
            if checked["mirror"]:
                assert self.find is not None
                shard.mirror = Mirror(shard, number, self._token, self.find, self.lease / 3)
                if not self.restarted:  # else what the other server has is wanted first
                    shard.mirror.start()
            # Where the launcher starts workers again, one that is lost may still come.
            shard.losses_are_final = os.environ.get("ALLHANDS_ON_WORKER_FAILURE") == "continue"
            self._began[number] = time.monotonic()
            self.shards[number] = shard
        return self.shards[number]

    def _copy(self, said: dict[str, Any]) -> Copy:
        """The copy of another server's part of the n-th store. `_lock` is held."""
        number, server = int(said["store"]), int(said["mirror"])
        if server != (self.number - 1) % self.servers:
            raise wire.RefusedError(f"server {self.number} keeps no copy of server {server}")
        if number not in self.copies or self.copies[number].finished:
            self.copies[number] = Copy(server, self.servers, self.workers, said["rules"])
        return self.copies[number]

    def _live(self, store: int) -> list[int]:
        """The workers that are counted on in a store."""
        shard = self.shards.get(store)
        return list(range(self.workers)) if shard is None else sorted(shard.members.everyone())

    def forget_finished(self) -> None:
        """Remove the snapshots of stores that all workers have left as they should."""
        for number, shard in list(self.shards.items()):
            if not shard.members.everyone() and shard.failure is None:
                self._forget(number)

    def _forget(self, number: int) -> None:
        shard = self.shards.pop(number)
        if shard.recovery is not None and shard.recovery.snapshots is not None:
            shard.recovery.snapshots.remove()
        if shard.mirror is not None:
            shard.mirror.close(finished=True)

    def _watch(self) -> None:
        """Find workers that are silent for longer than the lease."""
        every = min(0.5, self.lease / 4)
        suspension = wire.Suspension(every + 1.0)
        while not self._stopped:
            self._ending.wait(every)
            now = time.monotonic()
            suspended = suspension.ended(now)
            if suspended:
                self._began = dict.fromkeys(list(self._began), now)
            for number, part in list(self.shards.items()):
                if now - self._began[number] > self.patience and (
                    part.recovery is None or part.recovery.restored
                ):
                    self._not_come(part)
            for shard, session in [
                (part, one)
                for part in list(self.shards.values())
                for one in part.members.sessions_now()
            ]:
                if suspended:  # this process itself stood still
                    session.incoming.forgive(now)
                elif (silent := session.incoming.silent(now)) > self.lease:
                    why = (
                        f"worker {session.rank} ({session.about}) is lost: no sign of life for "
                        f"{silent:.0f} s (it is stopped or hangs, or its host or network is down; "
                        f"{LEASE} sets how long is waited)"
                    )
                    session.tell(
                        {"op": "failed", "error": f"the servers go on without this worker: {why}"}
                    )
                    shard.gone(session, why, polite=False)
                    session.end_soon()

    def _not_come(self, shard: Shard) -> None:
        """Go on without workers that have never come, or tell those that are here that they
        cannot."""
        for rank in sorted(shard.members.everyone() - self._came):
            shard.absent(
                rank,
                (
                    f"worker {rank} is lost: it has not connected to server {self.number} within "
                    f"{self.patience:.0f} s of the first worker (it ended, or is still at work "
                    f"before it creates the store; {START} sets how long is waited)"
                ),
            )


def main() -> None:
    """Announce this server and wait; SIGTERM ends it, once no worker is connected any more."""
    from torch.distributed import TCPStore

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    number, servers = int(os.environ["ALLHANDS_SERVER"]), int(os.environ["ALLHANDS_NUM_SERVERS"])
    meeting, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        lease = float(os.environ.get(LEASE, DEFAULT_LEASE))
        start = float(os.environ.get(START, DEFAULT_START))
        server = ParameterServer(
            number,
            servers,
            int(os.environ["WORLD_SIZE"]),
            token_from(os.environ),
            address_towards(meeting) or "",
            lease,
            restarted=os.environ.get("ALLHANDS_SERVER_RESTART", "0") != "0",
            start=start,
        )
    except (AllhandsError, ValueError) as error:
        sys.exit(f"allhands: server {number}: {error}")
    store = TCPStore(
        meeting, port, is_master=False, timeout=timedelta(minutes=5), wait_for_workers=False
    )
    server.find = lambda one: json.loads(store.get(key(one)))
    server.start()

    def leave(*_: Any) -> None:
        # All processes of a job are asked to end at once; workers may first bring a step to its
        # end, and save.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while any(part.members.sessions_now() for part in list(server.shards.values())):
            time.sleep(0.05)
        server.forget_finished()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    store.set(key(number), json.dumps(server.where()))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
