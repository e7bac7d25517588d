"""A worker's connections to the servers of a store: where its keys lie, what is set for all of
them, and their state."""

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
from safetensors.torch import save

from allhands.comm.codecs import NO_CODEC, Codec, codec_from
from allhands.errors import UserError, WorldError
from allhands.kvstore import servers_of_job
from allhands.kvstore.chunk_compression import ChunkCompressor
from allhands.kvstore.comeback import come_back, join
from allhands.kvstore.credentials import key as server_key
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.placement import KeyPiece, dtype_name
from allhands.kvstore.rules import check_servers, rules_of
from allhands.kvstore.server_link import LAST, ServerLink
from allhands.kvstore.server_sockets import TRANSPORT, TRANSPORTS
from allhands.kvstore.server_states import put_together, taken_apart
from allhands.kvstore.shared_memory import ChunkOffsets, SharedMemory, offsets
from allhands.kvstore.staging import Staging
from allhands.kvstore.store import KVStore
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.store_state import StoreState
from allhands.kvstore.values import RowSparse
from allhands.kvstore.wait_state import ServerLostError, WaitState
from allhands.kvstore.waits import Need, report
from allhands.kvstore.wire_frames import Kind, pack
from allhands.launch import worker

_LIFE = secrets.token_hex(8)  # of this process
_numbers = itertools.count()
START_TIMEOUT = 300.0


class Connected(KVStore):
    """The connections of a store to its servers, its keys, settings and state; what `ServedStore`
    stands on.

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
        self._unread: dict[
            str, int
        ] = {}  # keys that were pushed and not pulled since, and the priority of the push
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
            ServerLink(index, one, self._wait_state, said, transport)
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

    # ------------------------------------------------------------------ keys

    def declare(
        self,
        named: Mapping[str, torch.Tensor | RowSparse],
        complete: bool = False,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        groups = groups or {}
        forms: dict[str, dict[str, Any]] = {}
        for name, value in named.items():
            form: dict[str, Any]
            if isinstance(value, RowSparse):
                form = {"rows": value.rows, "columns": value.columns}
                form |= {"std": value.std, "seed": value.seed}
            else:
                form = {"shape": list(value.shape), "count": value.numel()}
            dtype = dtype_name(name, value.dtype)
            forms[name] = {**form, "dtype": dtype, "group": groups.get(name, 0)}
        placed = self.links[0].ask("declare", keys=forms, complete=complete)["placed"]
        dense = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        for name, value in named.items():
            self._pieces[name] = [KeyPiece(*piece) for piece in placed[name]]
            if isinstance(value, RowSparse):
                self.tables[name] = value
            else:
                self.shapes[name] = (value.shape, value.dtype)
        if complete:
            self._complete = sorted(dense)
        # Also when worker 0 comes again: it may have been lost before; servers keep values that
        # they have.
        given = dense if self.rank == 0 else {}
        flat = {
            name: value.detach().to("cpu").contiguous().view(-1) for name, value in given.items()
        }
        for link in self.links:
            here = self.pieces_on(link, named)
            parts = []
            for name, piece in here:
                value, form = named[name], forms[name]
                part = [piece.number, name, form["group"], form["dtype"]]
                if isinstance(value, RowSparse):
                    part += [value.rows, value.columns, value.std, value.seed]
                else:
                    part += [piece.start, piece.stop, complete]
                parts.append(part)
            told = link.ask("create", forms=parts)["versions"]
            # Of rows this worker has read none yet: it counts its own pushes.
            link.versions |= {
                piece.number: 0 if name in self.tables else told[str(piece.number)]
                for name, piece in here
            }
            for name, piece in here:
                if name in flat:
                    values = flat[name][piece.start : piece.stop].clone()
                    link.put(pack(Kind.INIT, chunk=piece.number, nbytes=values.nbytes), values)
        self._share(
            self.links, [(name, one) for name in dense for one in self._pieces[name]], buffers=True
        )
        for link in self.links:
            numbers = [one.number for _, one in self.pieces_on(link, dense)]
            link.answer(
                link.begin("ready", chunks=numbers),
                "init: the first values, which worker 0 gives",
                lambda: report(self, [("init", name, 1) for name in dense]),
            )
        if self._again:
            join(self, list(named))

    def pieces_on(self, link: ServerLink, names: Iterable[str]) -> list[tuple[str, KeyPiece]]:
        """The pieces of these keys that a server has."""
        own = [(name, one) for name in names for one in self._pieces[name]]
        return [(name, one) for name, one in own if one.server == link.number]

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

    # ------------------------------------------------------------------ settings, meeting, state

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        for link in self.links:
            link.ask("optimizer", name=spec.name, groups=list(spec.groups))
            link.adds = True

    def _set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        codec, down = codec_from(push), codec_from(pull)
        for link in self.links:
            link.ask("compression", push=push, pull=pull)
            link.down_codec = None if pull == NO_CODEC else down
            link.adds = self.optimizer is not None
        self._codec = None if push == NO_CODEC else codec
        self._compressors.clear()

    def barrier(self) -> None:
        self._usable()
        self._again_if_lost(self._settle)
        self._barriers += 1
        # One that came again has not counted with the others.
        number = 0 if self._again else self._barriers
        self._again_if_lost(lambda: self._wait_for_all(number))

    def _wait_for_all(self, number: int) -> None:
        """Wait until all workers have come to this barrier; 0: to any, on one that came again."""
        needs: list[Need] = [("barrier", "", number)] if number else []
        self.links[0].answer(
            self.links[0].begin("barrier", number=number), "barrier", lambda: report(self, needs)
        )

    def _settle(self) -> None:
        """Wait until the servers have taken all that this worker has sent."""
        asked = [(link, link.begin("settled", priority=LAST)) for link in self.links]
        for link, pending in asked:
            link.answer(pending, "settled")

    def state(self) -> StoreState:
        self._usable()
        found: StoreState = self._again_if_lost(self._state_once)
        return found

    def _state_once(self) -> StoreState:
        self._settle()
        found: dict[str, torch.Tensor] = {}
        for link in self.links:
            found |= {f"{link.number}\t{name}": one for name, one in link.ask("state").items()}
        return put_together(found, self._steps_before + self._version(), self._pieces, self.shapes)

    def load_state(self, state: StoreState) -> None:
        self.barrier()  # nobody's push is to come after it
        self._barriers += 1
        number = 0 if self._again else self._barriers

        def load() -> None:
            if self.rank == 0:
                self._give_state(state)
            self._wait_for_all(number)

        self._again_if_lost(load)  # all of it: a server may have gone back to the time before
        self._steps_before = state.step - self._version()

    def _give_state(self, state: StoreState) -> None:
        for link, part in zip(
            self.links, taken_apart(state, self._pieces, self.tables, len(self.links)), strict=True
        ):
            number, pending = link.expect()
            data = save(part)
            link.put(pack(Kind.STATE, meta=number, nbytes=len(data)) + data)
            link.answer(pending, "load_state")

    def residuals(self) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.shapes:
            pieces = self._pieces[name]
            parts = [
                self._compressors[one.number].state()
                for one in pieces
                if one.number in self._compressors
            ]
            if len(parts) == len(pieces) and parts:
                found[name] = torch.cat(parts)
        return found

    def _compresses(self) -> bool:
        return self._codec is not None

    def _load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        assert self._codec is not None
        for name, values in residuals.items():
            for piece in self._pieces[name]:
                compressor = self._compressors.setdefault(
                    piece.number, ChunkCompressor(self._codec, piece.stop - piece.start)
                )
                compressor.load(values.reshape(-1)[piece.start : piece.stop])

    # ------------------------------------------------------------------ a server that was lost

    def _version(self) -> int:
        """The steps that were taken over dense keys since the store was made."""
        return max((self._version_of(name) for name in self.shapes), default=0)

    def _version_of(self, name: str) -> int:
        """The newest round of a key, as this worker knows it."""
        return max(self.links[one.server].versions[one.number] for one in self._pieces[name])

    def _come_back(self) -> int | None:
        """Wait for a server that was lost; the step that all went back to, or None where nothing is
        lost."""
        before = self._version()
        step = come_back(self)
        if step is None:
            if self.rank == 0:
                print(
                    "allhands: a server was lost and has come back with all that it had; no step "
                    "is lost",
                    flush=True,
                )
            self._send_unread()
            return None
        self._kept.clear()
        if self.rank == 0:
            print(
                f"allhands: a server was lost and has come back; all go on from step {step}, of "
                f"which there is a snapshot: {before - step} finished steps are lost",
                flush=True,
            )
        return step

    def _send_unread(self) -> None:
        """Send again what was pushed and not read."""

    def _again_if_lost(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except ServerLostError:
                self._come_back()

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
