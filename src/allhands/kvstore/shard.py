"""What one server holds and decides: its chunks, the steps that are open, who is counted; no connection of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from allhands.errors import AllhandsError, UserError
from allhands.kvstore.arena import Arena, offsets
from allhands.kvstore.chunks import Chunk, Meta
from allhands.kvstore.compression import codec_from
from allhands.kvstore.members import Members
from allhands.kvstore.optimizers import OptimizerSpec, spec_from
from allhands.kvstore.placement import DTYPES, place
from allhands.kvstore.recovery import Recovery
from allhands.kvstore.store import RowSparse
from allhands.kvstore.table_rounds import TableRounds


class Shard:
    """One server's part of the store.

    Args:
        number: which server.
        servers: how many there are.
        workers: how many workers are counted on.
        rules: what the workers have agreed on: `wait` ("sync", "async" or "ssp"), `staleness`, `damping`, `on_worker_loss`.
    """

    def __init__(self, number: int, servers: int, workers: int, rules: dict[str, Any]) -> None:
        self.number, self.servers, self.workers, self.rules = number, servers, workers, rules
        self.synchronous = rules["wait"] == "sync"
        self.members = Members(workers)
        self.chunks: dict[int, Chunk] = {}
        self.tables: dict[int, TableRounds] = {}
        self.keys: dict[str, dict[str, Any]] = {}  # on server 0: form and places of every key
        self.sets: dict[str, Any] = {}  # on server 0: the whole set of keys that workers step over
        self.spec: OptimizerSpec | None = None
        self.compression: dict[str, Any] | None = None
        self.failure: str | None = None
        self.recovery: Recovery | None = None  # where there are snapshots
        self._lock = threading.RLock()
        self._blocks: list[tuple[Arena, list[int]]] = []
        self._clips: dict[int, dict[int, float]] = {}  # by step: square sums by chunk
        self._clip_metas: dict[int, list[Meta]] = {}
        self._forms: dict[int, tuple[str, int]] = {}  # by step: groups and clip of whoever came first
        self._clocks: dict[int, int] = {}
        self._ahead: list[tuple[int, Any, list[int]]] = []  # ssp: (clock, worker, chunks that it wants)
        self._barrier: dict[int, tuple[Any, int]] = {}
        self._initial: list[tuple[Any, int, set[int]]] = []
        self._updates = 0

    # ------------------------------------------------------------------ keys

    def declare(self, keys: dict[str, dict[str, Any]], rank: int, complete: bool) -> dict[str, Any]:
        """Place new keys, and say where all of these are; server 0 only.

        Raises:
            UserError: a key is there in another form, or another worker declared another set.
        """
        with self._lock:
            for name, form in keys.items():
                known = self.keys.get(name)
                if known is not None and known["form"] != form:
                    raise UserError(
                        f"the key '{name}' is {_told(form)} on worker {rank}, but {_told(known['form'])} on another worker"
                    )
            if complete:
                first = self.sets.setdefault("names", [rank, sorted(keys)])
                missing, more = sorted(set(first[1]) - set(keys)), sorted(set(keys) - set(first[1]))
                if missing or more:
                    has = f"has no key '{missing[0]}'" if missing else f"has the key '{more[0]}'"
                    other = "has" if missing else "has not"
                    raise UserError(
                        f"worker {rank} {has}, which worker {first[0]} {other}: all workers must train the same parameters"
                    )
            new = {name: form for name, form in keys.items() if name not in self.keys}
            dense = {name: form for name, form in new.items() if "rows" not in form}
            sizes = {name: (form["count"], DTYPES[form["dtype"]].itemsize) for name, form in dense.items()}
            loads = [0] * self.servers
            highest = 0
            for known in self.keys.values():
                for number, server, start, stop in known["pieces"]:
                    loads[server] += (stop - start) * DTYPES[known["form"]["dtype"]].itemsize
                    highest = max(highest, number + 1)
            placed = place(sizes, loads, highest)
            for name, pieces in placed.items():
                self.keys[name] = {
                    "form": dense[name], "pieces": [[piece.number, piece.server, piece.start, piece.stop] for piece in pieces],
                }  # fmt: skip
            highest += sum(len(pieces) for pieces in placed.values())
            for number, name in enumerate(sorted(set(new) - set(dense)), highest):
                self.keys[name] = {"form": new[name], "pieces": [[number, server, 0, 0] for server in range(self.servers)]}
            return {name: self.keys[name]["pieces"] for name in keys}

    def create(self, chunks: list[list[Any]]) -> dict[str, int]:
        """Make the chunks that are not there yet; the version of each."""
        with self._lock:
            new = [one for one in chunks if one[0] not in self.chunks]
            if new:
                sizes = [(stop - start) * DTYPES[dtype].itemsize for _, _, start, stop, dtype, _, _ in new]
                starts, total = offsets(sizes)
                arena = Arena(total)
                self._blocks.append((arena, [one[0] for one in new]))
                for (number, key, start, stop, dtype, group, trained), offset in zip(new, starts, strict=True):
                    weights = arena.view(offset, stop - start, DTYPES[dtype])
                    chunk = Chunk(number, key, start, stop, group, weights, block=len(self._blocks) - 1, offset=offset)
                    chunk.trained = bool(trained)
                    if self.spec is not None:
                        chunk.set_optimizer(self.spec)
                    self.chunks[number] = chunk
            return {str(one[0]): self.chunks[one[0]].version for one in chunks}

    def create_tables(self, tables: list[list[Any]]) -> None:
        """Make this server's part of tables of rows."""
        with self._lock:
            for number, key, rows, columns, std, seed, dtype, group in tables:
                if number not in self.tables:
                    table = RowSparse(rows, columns, std, seed, DTYPES[dtype])
                    self.tables[number] = TableRounds(number, key, table, group, self.spec)

    def block(self, number: int) -> tuple[Arena, list[list[int]]]:
        """Memory with the values of chunks, and where in it each begins."""
        arena, chunks = self._blocks[number]
        return arena, [[one, self.chunks[one].offset, len(self.chunks[one].weights)] for one in chunks]

    def initialise(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Take the first value; a later one is left, because the training has begun."""
        with chunk.lock:
            if not chunk.ready:
                chunk.weights.copy_(values)
                chunk.ready = True
                if self.spec is not None:
                    chunk.set_optimizer(self.spec)
                if self.compression and self.compression["pull"]["type"] != "none":
                    chunk.compress_down(codec_from(self.compression["pull"]))
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
            missing = {number for number in chunks if not self.chunks[number].ready}
            if missing:
                left.append((session, request, missing))
            else:
                session.reply(request)
        self._initial = left

    def set_optimizer(self, name: str, groups: list[dict[str, Any]]) -> None:
        """Take steps with pushed values from now on; the second worker that says the same changes nothing.

        Raises:
            UserError: another worker has set another one, or there is no such optimizer here.
        """
        spec = spec_from(OptimizerSpec(name, tuple(groups)))
        with self._lock:
            if self.spec is not None:
                if (spec.name, json.dumps(spec.groups)) != (self.spec.name, json.dumps(self.spec.groups)):
                    raise UserError(
                        f"the optimizer is {spec.name} {list(spec.groups)} on this worker, but {self.spec.name} "
                        f"{list(self.spec.groups)} on another"
                    )
                return
            self.spec = spec
            for chunk in self.chunks.values():
                with chunk.lock:
                    chunk.set_optimizer(spec)
            for table in self.tables.values():
                table.set_optimizer(spec)

    def set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        """Expect pushes in this form, and send values in that."""
        wanted = {"push": push, "pull": pull}
        codec_from(push), codec_from(pull)
        with self._lock:
            if self.compression is not None and self.compression != wanted:
                raise UserError(f"the compression is {wanted} on this worker, but {self.compression} on another")
            if self.compression is None:
                self.compression = wanted
                if pull["type"] != "none":
                    for chunk in self.chunks.values():
                        with chunk.lock:
                            chunk.compress_down(codec_from(pull))

    # ------------------------------------------------------------------ steps

    def announce(self, meta: Meta) -> None:
        """A worker begins a step.

        Raises:
            UserError: its learning rate, or another number of the optimizer, is not that of the others.
        """
        if self.failure:
            raise UserError(self.failure)
        meta.left = meta.chunks
        if not self.synchronous:
            if self.spec is None and not self.rules.get("assign"):
                raise UserError(
                    f"create('dist_{self.rules['wait']}') applies each push by itself, which needs an optimizer: call "
                    "set_optimizer first"
                )
            if not meta.chunks:
                self._step_done(meta)
            return
        form = json.dumps([meta.groups, meta.clip, meta.expected])
        with self._lock:
            first, rank = (form, meta.worker.rank) if meta.idle else self._forms.setdefault(meta.step, (form, meta.worker.rank))
            if form != first:
                raise UserError(
                    f"in step {meta.step} worker {meta.worker.rank} has {form} for [the optimizer's options, "
                    f"clip_norm, expected], but worker {rank} has {first}: all workers must step with the same"
                )
            while len(self._forms) > 64:
                del self._forms[next(iter(self._forms))]
            if meta.clip is not None:
                self._clip_metas.setdefault(meta.step, []).append(meta)
        if not meta.chunks:
            meta.worker.finished(meta, len(self.members.everyone()), 0.0)

    def push(
        self, chunk: Chunk, number: int, meta: Meta, values: torch.Tensor, release: Callable[[], None], wanted: bool
    ) -> None:
        """A worker's values for a round."""
        worker = meta.worker
        with chunk.lock:
            if self.recovery is not None and worker.occasion != self.recovery.occasion:
                release()  # of the time before the servers went back
                return
            if not self.synchronous:
                self._apply_alone(chunk, number, meta, values, release, wanted)
                return
            if number <= chunk.version:  # the others went on without it, or it was sent again after a lost connection
                release()
                if wanted:
                    chunk.waiting.append((worker, 0))
                    chunk.serve()
                self._part_done(meta, len(chunk.added) or 1)
                return
            if number != chunk.version + 1:
                release()
                raise UserError(f"the key '{chunk.key}' is at version {chunk.version}; a push for {number} cannot be placed")
            if wanted:
                chunk.waiting.append((worker, number))
            self._after(chunk, chunk.take(worker.rank, values, meta, release, self.members.counted(chunk.key, number)))

    def _after(self, chunk: Chunk, complete: bool) -> None:
        """Go on with a round whose pushes have been added up. The chunk's lock is held."""
        if not complete:
            return
        try:
            square = chunk.combine()
        except UserError as error:
            self.fail(str(error))
            return
        step, clip = chunk.added[0].step, chunk.lead().clip
        if clip is None:
            self._closed(chunk, 1.0)
            return
        chunk.clipped = True
        with self._lock:
            squares = self._clips.setdefault(step, {})
            squares[chunk.number] = square
            metas = list(self._clip_metas.get(step, ()))
            if not metas:  # the servers are going back to a snapshot at this moment
                return
            if len(squares) < metas[0].chunks:
                return
        for meta in metas:
            meta.worker.tell({"op": "squares", "step": step, "squares": list(squares.items())})

    def commit(self, step: int, scale: float) -> None:
        """Apply a clipped step; the first worker that knows the norm of all servers says by how much."""
        with self._lock:
            squares = self._clips.pop(step, None)
            self._clip_metas.pop(step, None)
        for number in squares or {}:
            chunk = self.chunks[number]
            with chunk.lock:
                if chunk.clipped:
                    self._closed(chunk, scale)

    def _closed(self, chunk: Chunk, scale: float) -> None:
        try:
            metas = chunk.close(scale)
        except AllhandsError as error:
            self.fail(f"the key '{chunk.key}': {error}")
            return
        if self.recovery is not None:
            self.recovery.closed(self, chunk)
        for meta in metas:
            self._part_done(meta, len(metas))

    def _part_done(self, meta: Meta, workers: int) -> None:
        meta.workers = workers
        with self._lock:
            meta.left -= 1
            done = meta.left == 0
        if done:
            self._step_done(meta)

    def _step_done(self, meta: Meta) -> None:
        meta.worker.finished(meta, meta.workers or 1, meta.staleness / max(1, meta.chunks))
        if self.recovery is not None and not self.synchronous:
            self.recovery.stepped(self)
        if self.rules["wait"] == "ssp":
            with self._lock:
                self._clocks[meta.worker.rank] = self._clocks.get(meta.worker.rank, 0) + 1
                self._let_go()

    # ------------------------------------------------------------------ without waiting, and with bounded staleness

    def _apply_alone(self, chunk: Chunk, number: int, meta: Meta, values: torch.Tensor, release: Callable[[], None],
                     wanted: bool) -> None:  # fmt: skip
        worker = meta.worker
        if number > chunk.last.get(worker.rank, 0):
            chunk.last[worker.rank] = number
            stale = max(0, chunk.version - chunk.seen.get(worker.rank, chunk.version))
            chunk.added, chunk.total, chunk.held = [meta], values, [release]
            chunk.combine()
            options = meta.options(chunk.group)
            if stale and self.rules.get("damping"):
                rate = (options or (self.spec.groups[chunk.group] if self.spec else {})).get("lr", 0.0)
                options = {**(options or {}), "lr": rate / (1 + stale)}
            try:
                chunk.apply(values, options)
            finally:
                chunk.clear()
            chunk.version += 1
            with self._lock:
                meta.staleness += stale
        else:
            release()
        if self.rules["wait"] == "ssp":
            if wanted:
                with self._lock:
                    self._ahead.append((self._clocks.get(worker.rank, 0) + 1, worker, [chunk.number]))
        elif wanted:
            chunk.waiting.append((worker, 0))
            chunk.serve()
        self._part_done(meta, 1)

    def _let_go(self) -> None:
        """Answer the workers that are no more than `staleness` steps ahead of the slowest. `_lock` is held."""
        live = self.members.everyone()
        slowest = min((self._clocks.get(rank, 0) for rank in live), default=0)
        due = [one for one in self._ahead if one[0] - slowest <= self.rules["staleness"]]
        self._ahead = [one for one in self._ahead if one[0] - slowest > self.rules["staleness"]]
        for _, worker, numbers in due:
            worker.later(numbers)

    # ------------------------------------------------------------------ reading, meeting

    def pull(self, worker: Any, chunk: Chunk, version: int) -> None:
        """Send a value once it has this version."""
        with chunk.lock:
            chunk.waiting.append((worker, version if self.synchronous else 0))
            chunk.serve()

    def barrier(self, session: Any, request: int) -> None:
        """Answer once all workers that are counted on have asked."""
        with self._lock:
            self._barrier[session.rank] = (session, request)
            self._open_barrier()

    def _open_barrier(self) -> None:
        if self._barrier and self.members.everyone() <= self._barrier.keys():
            waiting, self._barrier = self._barrier, {}
            for session, request in waiting.values():
                session.reply(request)

    # ------------------------------------------------------------------ who is there

    def gone(self, session: Any, reason: str, polite: bool) -> None:
        """A worker has left, or is lost; the others go on without it, or all are told that they cannot."""
        if not self.members.remove(session, reason):
            return
        with self._lock:
            self._barrier.pop(session.rank, None)
            self._ahead = [one for one in self._ahead if one[1] is not session]
            self._initial = [one for one in self._initial if one[0] is not session]
        if not polite and self.rules["on_worker_loss"] == "stop":
            self.fail(reason)
            return
        for chunk in list(self.chunks.values()):
            with chunk.lock:
                chunk.waiting = [one for one in chunk.waiting if one[0] is not session]
                if chunk.added or chunk.arrived:
                    self._after(chunk, chunk.add_up(self.members.counted(chunk.key, chunk.version + 1)))
        for table in self.tables.values():
            table.look_again(self.members)
        if self.recovery is not None:
            self.recovery.look_again(self)
        with self._lock:
            self._open_barrier()
            if self.rules["wait"] == "ssp":
                self._let_go()
            clips = [(step, dict(squares), list(self._clip_metas.get(step, ()))) for step, squares in self._clips.items()]
        for step, squares, metas in clips:  # the one that was lost may have been about to commit
            if metas and len(squares) >= metas[0].chunks:
                for meta in metas:
                    meta.worker.tell({"op": "squares", "step": step, "squares": list(squares.items())})

    # ------------------------------------------------------------------ going back to a snapshot

    def trained(self) -> set[int]:
        """The chunks that every step is over; all of them where no worker has said which."""
        return {number for number, chunk in self.chunks.items() if chunk.trained} or set(self.chunks)

    def drop_open(self) -> None:
        """Forget all that is open: rounds, clipped steps, barriers, and who waits."""
        with self._lock:
            self._clips.clear()
            self._clip_metas.clear()
            self._forms.clear()
            self._barrier.clear()
            self._ahead, self._initial = [], []
            self._clocks = dict.fromkeys(self._clocks, 0)
        for chunk in list(self.chunks.values()):
            with chunk.lock:
                chunk.drop()

    def rebuild(self, fields: dict[str, Any]) -> None:
        """Make what a snapshot says there was; its numbers are loaded afterwards."""
        with self._lock:
            self.keys, self.sets = fields["keys"], fields["sets"]
            if fields["optimizer"] is not None and self.spec is None:
                self.set_optimizer(fields["optimizer"]["name"], fields["optimizer"]["groups"])
            if fields["compression"] is not None and self.compression is None:
                self.set_compression(**fields["compression"])
            self.create(fields["chunks"])
            self.create_tables(fields["tables"])
            for number, version in fields["versions"].items():
                chunk = self.chunks[int(number)]
                chunk.version, chunk.ready = version, True
                chunk.last.clear()
                chunk.seen.clear()
            for number, version in fields["table_versions"].items():
                self.tables[int(number)].version = version
            with self.members.lock:
                self.members.live = set(fields["live"])

    def join(self, session: Any, begins: dict[str, int]) -> None:
        """Count a worker again, from these rounds on.

        Raises:
            UserError: the others are beyond one of them.
        """
        with self._lock:
            if self.number == 0:
                for chunk in self.chunks.values():
                    if begins.get(chunk.key, 0) <= chunk.version + 1 and chunk.key in begins:
                        raise UserError("late")
            self.members.count_from(session.rank, begins)
            live = self.members.everyone()
            self._clocks[session.rank] = min((self._clocks.get(rank, 0) for rank in live if rank != session.rank), default=0)

    def fail(self, text: str) -> None:
        """Nothing can go on; every worker that waits, or asks later, is told why."""
        self.failure = self.failure or text
        for session in self.members.sessions_now():
            session.tell({"op": "failed", "error": self.failure})


def _told(form: dict[str, Any]) -> str:
    if "rows" in form:
        return f"a table of {form['rows']} rows of {form['columns']} {form['dtype']}"
    return f"{form['dtype']} of shape {form['shape']}"
