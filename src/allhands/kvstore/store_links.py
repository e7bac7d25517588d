"""A worker's connections to the servers of a store, and where its keys lie on them."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

import torch

from allhands.comm.codecs import Codec
from allhands.comm.traffic import SERVERS, Collective, tell
from allhands.errors import UserError, WorldError
from allhands.kvstore.chunk_compression import ChunkCompressor
from allhands.kvstore.credentials import key as server_key
from allhands.kvstore.credentials import servers_of_job
from allhands.kvstore.placement import KeyPiece
from allhands.kvstore.rules import check_servers, rules_of
from allhands.kvstore.server_link import ServerLink
from allhands.kvstore.server_sockets import TRANSPORT, TRANSPORTS
from allhands.kvstore.shared_memory import ChunkOffsets, SharedMemory, offsets
from allhands.kvstore.staging import Staging
from allhands.kvstore.store import KVStore
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.wait_state import WaitState
from allhands.launch import worker

_LIFE = secrets.token_hex(8)  # of this process
_numbers = itertools.count()
START_TIMEOUT = 300.0


class StoreLinks(KVStore):
    """The connections of a store to its servers. Whoever counts traffic is told of the values in
    both directions, each server's together; between processes of one host they lie in memory that
    both map.

    Args:
        mode: what `create` was given.
        rank, num_workers: who takes part.
        where: each server's announcement.
        rules: what all workers must agree on.
        number: how many stores this worker has made before; the same store has the same on all
            workers.
        life: of this process; another one after it was started again.
        transport: "auto", or one of `TRANSPORTS`.
        find: gives a server's present announcement, for one that was started again.

    Attributes:
        links: the servers.
    """

    #: What a server is talked to by.
    link_type: type[ServerLink] = ServerLink

    def __init__(
        self,
        mode: Mode,
        rank: int,
        num_workers: int,
        where: Sequence[Mapping[str, Any]],
        rules: dict[str, Any],
        number: int,
        life: str = _LIFE,
        transport: str = "auto",
        find: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(mode, rank, num_workers)
        check_servers(mode, rules, len(where))
        self.rules = rules
        self._sync = rules["wait"] == "sync"
        self._wait_state = WaitState()
        self._pieces: dict[str, list[KeyPiece]] = {}
        self._metas = itertools.count(1)
        # Keys that were pushed and not pulled since, and the priority of the push.
        self._unread: dict[str, int] = {}
        self._complete: list[str] = []
        self._codec: Codec | None = None
        self._compressors: dict[int, ChunkCompressor] = {}
        self._closed = False
        self._barriers = 0
        self._threads: set[int] = set()  # that have used the store
        self._kept: dict[str, Any] = {}  # with mirrors: what was pushed and not read
        # What is sent in fewer bits, the same when it is sent again.
        self._sent: dict[int, torch.Tensor] | None = None
        self._steps_before = 0  # those of the state that was loaded
        self._staging = Staging()
        self._find, self._transport = find, transport
        self._said = said = {
            "rank": rank,
            "rules": rules,
            "life": life,
            "store": number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self.links = [
            self.link_type(index, one, self._wait_state, said, transport)
            for index, one in enumerate(where)
        ]
        for link in self.links:
            link.comes_back = find is not None and (rules["snapshot_every"] > 0 or rules["mirror"])
        self._again = any(link.again for link in self.links)
        atexit.register(self._leave)

    @classmethod
    def connect(cls, mode: Mode, options: Mapping[str, Any]) -> Self:
        """Find the job's servers through its store, and connect to all of them.

        Raises:
            UserError: an option, or a variable of the job, is wrong.
            WorldError: a server does not appear, or cannot be reached.
        """
        from torch.distributed import DistStoreError, TCPStore

        rules = rules_of(mode, options)
        missing = [
            name
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if name not in os.environ
        ]
        if missing:
            raise UserError(
                f"ALLHANDS_NUM_SERVERS is set, but {', '.join(missing)} is not; start the job with "
                "`allhands launch -s …`"
            )
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(
            address,
            port,
            is_master=False,
            timeout=timedelta(seconds=START_TIMEOUT),
            wait_for_workers=False,
        )

        def find(number: int) -> dict[str, Any]:
            try:
                found: dict[str, Any] = json.loads(store.get(server_key(number)))
            except (DistStoreError, RuntimeError) as error:
                raise WorldError(
                    f"server {number} has not appeared within {START_TIMEOUT:.0f} s: {error}"
                ) from error
            return found

        where = [find(number) for number in range(servers_of_job())]
        transport = os.environ.get(TRANSPORT, "auto")
        if transport not in ("auto", *TRANSPORTS):
            raise UserError(f"{TRANSPORT}={transport}; it must be auto, {', '.join(TRANSPORTS)}")
        return cls(
            mode,
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            where,
            rules,
            next(_numbers),
            transport=transport,
            find=find,
        )

    def pieces_on(self, link: ServerLink, names: Iterable[str]) -> list[tuple[str, KeyPiece]]:
        own = [(name, one) for name in names for one in self._pieces[name]]
        return [(name, one) for name, one in own if one.server == link.number]

    def _tell(self, kind: str, sizes: Iterable[tuple[int, int]]) -> None:
        """Tell whoever counts of values that travel: servers and bytes."""
        by_server: dict[int, int] = {}
        for server, size in sizes:
            by_server[server] = by_server.get(server, 0) + size
        for server, size in sorted(by_server.items()):
            tell(Collective(kind, size, len(self.links) + 1, SERVERS, server))

    def _tell_answers(self, names: Iterable[str]) -> None:
        """Likewise of the values of these keys that come."""
        codecs = [link.down_codec for link in self.links]
        self._tell(
            "recv",
            (
                (
                    one.server,
                    (one.stop - one.start) * self.shapes[name][1].itemsize
                    if (codec := codecs[one.server]) is None
                    else codec.nbytes(one.stop - one.start),
                )
                for name in names
                for one in self._pieces[name]
            ),
        )

    def _share(
        self,
        links: Sequence[ServerLink],
        pieces: Sequence[tuple[str, KeyPiece]],
        buffers: bool = False,
    ) -> None:
        """Map memory with servers of this host; with `buffers`, also for `buffer` of these keys,
        across all servers."""
        if not any(link.local for link in links) or not pieces:
            return
        sizes = [(one.stop - one.start) * self.shapes[name][1].itemsize for name, one in pieces]
        whole = (
            {
                name: self.shapes[name][0].numel() * self.shapes[name][1].itemsize
                for name, _ in pieces
            }
            if buffers
            else {}
        )
        starts, total = offsets([*sizes, *whole.values()])
        first = dict(zip(whole, starts[len(sizes) :], strict=True))
        memory = SharedMemory(total)
        for link in links:
            places = {}
            for (name, one), start in zip(pieces, starts, strict=False):
                dtype = self.shapes[name][1]
                if one.server == link.number:
                    buffer = first[name] + one.start * dtype.itemsize if buffers else None
                    places[one.number] = ChunkOffsets(one.stop - one.start, dtype, start, buffer)
            link.share(memory, places)
        memory.close_file()
        for name, start in first.items():
            shape, dtype = self.shapes[name]
            self._buffers[name] = memory.view(start, shape.numel(), dtype).view(shape)

    def _version(self) -> int:
        """The steps that were taken over dense keys since the store was made."""
        return max((self._version_of(name) for name in self.shapes), default=0)

    def _version_of(self, name: str) -> int:
        """The newest round of a key, as this worker knows it."""
        return max(self.links[one.server].versions[one.number] for one in self._pieces[name])

    # ------------------------------------------------------------------ the end

    def _usable(self) -> None:
        self._threads.add(threading.get_ident())
        if self._closed:
            raise UserError("this store was closed; create another")
        if self._wait_state.failure is not None:
            raise type(self._wait_state.failure)(
                *self._wait_state.failure.args
            ) from self._wait_state.failure

    def close(self) -> None:
        """Leave the store; the others go on without this worker."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._leave)
            for link in self.links:
                link.close()

    def _leave(self) -> None:
        """At the end of a script; after an error without a goodbye, and not only when Python has
        taken down all that it holds."""
        if getattr(sys, "last_type", None) is None and not worker.exit_code:
            self.close()
        else:
            for link in self.links:
                link.abandon()
