"""The keys of one server: its part of each, where it lies, and what all workers have set for
them."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch

from allhands.comm.codecs import NO_CODEC, Codec, codec_from
from allhands.errors import UserError
from allhands.kvstore.chunk_compression import both_ways, compressible
from allhands.kvstore.chunks import Chunk
from allhands.kvstore.members import Members
from allhands.kvstore.optimizers import OptimizerSpec, spec_from
from allhands.kvstore.placement import DTYPES, place
from allhands.kvstore.shared_memory import SharedMemory, offsets
from allhands.kvstore.table_rounds import TableRounds
from allhands.kvstore.values import RowSparse

_DENSE = 7  # entries in the form of a chunk


class ShardKeys:
    """What a `Shard` holds.

    Attributes:
        parts: each a `KeyPart`, a chunk of a dense key or a table of rows, by its number in the
            job.
        keys: on server 0: form and places of every key.
        sets: on server 0: the whole set of keys that workers step over.
        spec: the optimizer.
        compression: of pushes and pulls.
        push_codec: that of the pushes.
        mirror: what keeps a copy of all of it on another server.
        passed: how many barriers all workers have passed.
    """

    def __init__(self, number: int, servers: int, members: Members) -> None:
        self.number, self.servers, self.members = number, servers, members
        self.parts: dict[int, Any] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.sets: dict[str, Any] = {}
        self.spec: OptimizerSpec | None = None
        self.compression: dict[str, Any] | None = None
        self.push_codec: Codec | None = None
        self.mirror: Any = None
        self.passed = 0
        # Taken before a chunk's lock, and `_lock` after it.
        self._settings = threading.Lock()
        self._lock = threading.RLock()
        self._blocks: list[tuple[SharedMemory, list[int]]] = []
        # (worker, request, chunks) that wait for first values.
        self._initial: list[tuple[Any, int, set[int]]] = []

    def declare(self, keys: dict[str, dict[str, Any]], rank: int, complete: bool) -> dict[str, Any]:
        """Place new keys, and say where all of these are; server 0 only."""
        with self._lock:
            for name, form in keys.items():
                known = self.keys.get(name)
                if known is not None and known["form"] != form:
                    raise UserError(
                        f"the key '{name}' is {_told(form)} on worker {rank}, but "
                        f"{_told(known['form'])} on another worker"
                    )
            if complete:
                first = self.sets.setdefault("names", [rank, sorted(keys)])
                missing, more = sorted(set(first[1]) - set(keys)), sorted(set(keys) - set(first[1]))
                if missing or more:
                    has = f"has no key '{missing[0]}'" if missing else f"has the key '{more[0]}'"
                    other = "has" if missing else "has not"
                    raise UserError(
                        f"worker {rank} {has}, which worker {first[0]} {other}: all workers must "
                        "train the same parameters"
                    )
            new = {name: form for name, form in keys.items() if name not in self.keys}
            dense = {name: form for name, form in new.items() if "rows" not in form}
            sizes = {
                name: (form["count"], DTYPES[form["dtype"]].itemsize)
                for name, form in dense.items()
            }
            loads = [0] * self.servers
            highest = 0
            for known in self.keys.values():
                for number, server, start, stop in known["pieces"]:
                    loads[server] += (stop - start) * DTYPES[known["form"]["dtype"]].itemsize
                    highest = max(highest, number + 1)
            placed = place(sizes, loads, highest)
            for name, pieces in placed.items():
                self.keys[name] = {
                    "form": dense[name],
                    "pieces": [
                        [piece.number, piece.server, piece.start, piece.stop] for piece in pieces
                    ],
                }
            highest += sum(len(pieces) for pieces in placed.values())
            for number, name in enumerate(sorted(set(new) - set(dense)), highest):
                self.keys[name] = {
                    "form": new[name],
                    "pieces": [[number, server, 0, 0] for server in range(self.servers)],
                }
            return {name: self.keys[name]["pieces"] for name in keys}

    def create(self, forms: list[list[Any]]) -> dict[str, int]:
        """Make the parts that are not there yet, as `KeyPart.form` says; the version of each."""
        with self._lock:
            new = [one for one in forms if one[0] not in self.parts]
            dense = [one for one in new if len(one) == _DENSE]
            if dense:
                self._create_chunks(dense)
            for number, key, group, dtype, rows, columns, std, seed in [
                one for one in new if len(one) != _DENSE
            ]:
                form = RowSparse(rows, columns, std, seed, DTYPES[dtype])
                self.parts[number] = TableRounds(number, key, form, group, self.spec)
            return {str(one[0]): self.parts[one[0]].version for one in forms}

    def _create_chunks(self, forms: list[list[Any]]) -> None:
        starts, total = offsets(
            (stop - start) * DTYPES[dtype].itemsize for _, _, _, dtype, start, stop, _ in forms
        )
        memory = SharedMemory(total)
        self._blocks.append((memory, [one[0] for one in forms]))
        for (number, key, group, dtype, start, stop, trained), offset in zip(
            forms, starts, strict=True
        ):
            weights = memory.view(offset, stop - start, DTYPES[dtype])
            block = len(self._blocks) - 1
            chunk = Chunk(number, key, start, stop, group, weights, block, offset)
            chunk.trained = bool(trained)
            chunk.set_optimizer(self.spec)
            self.parts[number] = chunk

    def chunks(self) -> list[Chunk]:
        """The parts of dense keys."""
        return [part for part in list(self.parts.values()) if isinstance(part, Chunk)]

    def block(self, number: int) -> tuple[SharedMemory, list[list[int]]]:
        """The memory in which a chunk lies, and where in it each of its chunks begins."""
        memory, numbers = self._blocks[self.parts[number].block]
        chunks = [self.parts[one] for one in numbers]
        return memory, [[one.number, one.offset, len(one.weights)] for one in chunks]

    def initialise(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Take the first value; a later one is left, because the training has begun."""
        with chunk.lock:
            if not chunk.ready:
                chunk.weights.copy_(values)
                chunk.ready = True
                if self.spec is not None:
                    chunk.set_optimizer(self.spec)
                self._compress_down(chunk)
                if self.mirror is not None:
                    self.mirror.settle(chunk, None)
        with self._lock:
            self._tell_initialised()

    def wait_initialised(self, session: Any, request: int, chunks: set[int]) -> None:
        """Answer the request once rank 0 has given all of these."""
        with self._lock:
            self._initial.append((session, request, chunks))
            self._tell_initialised()

    def _tell_initialised(self) -> None:
        left = []
        for session, request, chunks in self._initial:
            missing = {number for number in chunks if not self.parts[number].ready}
            if missing and 0 in self.members.final:
                names = ", ".join(sorted({f"'{self.parts[number].key}'" for number in missing}))
                session.reply(
                    request,
                    lost="worker 0 has left or is lost, and has not given the first values of "
                    f"{names}; start again",
                )
            elif missing:
                left.append((session, request, missing))
            else:
                session.reply(request)
        self._initial = left

    def set_optimizer(self, name: str, groups: list[dict[str, Any]]) -> None:
        """Take steps with pushed values from now on; the second worker that says the same changes
        nothing.

        Raises:
            UserError: another worker has set another one, or there is no such optimizer here.
        """
        spec = spec_from(OptimizerSpec(name, tuple(groups)))
        with self._settings:
            if self.spec is not None:
                if (spec.name, json.dumps(spec.groups)) != (
                    self.spec.name,
                    json.dumps(self.spec.groups),
                ):
                    raise UserError(
                        f"the optimizer is {spec.name} {list(spec.groups)} on this worker, but "
                        f"{self.spec.name} {list(self.spec.groups)} on another"
                    )
                return
            self.spec = spec
            for part in list(self.parts.values()):
                with part.lock:
                    part.set_optimizer(spec)
                    part.changed_outside()  # of chunks, changes are sent from now on, and not sums

    def set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        """Expect pushes in this form, and send values in that."""
        push, pull = both_ways({**push, "pull": pull})  # a snapshot may have old spellings
        wanted = {"push": push, "pull": pull}
        with self._settings:
            if self.compression is not None and self.compression != wanted:
                raise UserError(
                    f"the compression is {wanted} on this worker, but {self.compression} on another"
                )
            if self.compression is None:
                self.compression, self.push_codec = wanted, codec_from(push)
                for chunk in self.chunks():
                    with chunk.lock:
                        self._compress_down(chunk)

    def _compress_down(self, chunk: Chunk) -> None:
        pull = self.compression["pull"] if self.compression else NO_CODEC
        if pull != NO_CODEC and compressible(chunk.weights.dtype):
            chunk.compress_down(codec_from(pull))

    def trained(self) -> set[int]:
        """The chunks that every step is over; all of them where no worker has said which."""
        chunks = self.chunks()
        return {one.number for one in chunks if one.trained} or {one.number for one in chunks}

    def rebuild(self, settings: dict[str, Any]) -> None:
        """Make what `settings_of` says there was; values are loaded afterwards."""
        with self._lock:
            fresh = not self.keys and not self.parts
            self.keys, self.sets = settings["keys"], settings["sets"]
            if settings["optimizer"] is not None and self.spec is None:
                self.set_optimizer(settings["optimizer"]["name"], settings["optimizer"]["groups"])
            if settings["compression"] is not None and self.compression is None:
                self.set_compression(**settings["compression"])
            self.create(settings["forms"])
            for chunk in self.chunks():
                if chunk.down is None:
                    self._compress_down(chunk)
            self.passed = max(self.passed, settings["passed"])
            if fresh:  # a server that lives knows better who is there
                self.members.restore(settings["live"])


def _told(form: dict[str, Any]) -> str:
    if "rows" in form:
        return f"a table of {form['rows']} rows of {form['columns']} {form['dtype']}"
    return f"{form['dtype']} of shape {form['shape']}"
