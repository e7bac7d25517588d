"""`ServedStore`: the values lie on parameter servers, and the workers talk to those and not to one another."""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import secrets
import socket
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import save

from allhands.errors import UserError, WorldError
from allhands.kvstore.bucket import clip_factor
from allhands.kvstore.comeback import come_back
from allhands.kvstore.compression import Codec, Compressor, codec_from
from allhands.kvstore.frames import LONGEST_ROWS, Kind, message, pack
from allhands.kvstore.link import TRANSPORT, TRANSPORTS, Board, Link, Pending, ServerLostError
from allhands.kvstore.modes import Mode
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.placement import Piece, dtype_name
from allhands.kvstore.server import key as server_key
from allhands.kvstore.server_states import put_together, taken_apart
from allhands.kvstore.states import StoreState
from allhands.kvstore.store import Key, KVStore, RowSparse, Share, Step, check_rows
from allhands.kvstore.table_rounds import pack_rows

_LIFE = secrets.token_hex(8)  # of this process
_numbers = itertools.count()
START_TIMEOUT = 300.0


def _options(mode: Mode, options: Mapping[str, Any]) -> dict[str, Any]:
    """The checked rules of a store: what all workers must agree on.

    Raises:
        UserError: an option that there is not, or a value that it cannot have.
    """
    chosen = os.environ.get("ALLHANDS_ON_WORKER_FAILURE", "stop")
    rules: dict[str, Any] = {
        "staleness": 0, "damping": False, "on_worker_loss": "stop" if chosen == "stop" else "continue",
        "snapshot_every": 0, "snapshot_dir": "",
    }  # fmt: skip
    for name, value in options.items():
        if name not in rules:
            raise UserError(f"create('{mode.name}') has no option '{name}'; its options are {', '.join(rules)}")
        rules[name] = value
    if "staleness" in options and mode.wait != "ssp":
        raise UserError(
            f"create('{mode.name}', staleness=…): only 'dist_ssp' bounds staleness; leave it out, or write create('dist_ssp')"
        )
    if rules["damping"] and mode.wait == "sync":
        raise UserError(f"create('{mode.name}', damping=True): synchronous steps are never stale; leave it out")
    if isinstance(rules["staleness"], bool) or not isinstance(rules["staleness"], int) or rules["staleness"] < 0:
        raise UserError(f"staleness={rules['staleness']!r}; it must be a whole number of steps, 0 or more")
    if mode.wait == "ssp" and "staleness" not in options:
        raise UserError("create('dist_ssp') needs staleness=…, how many steps the fastest worker may run ahead of the slowest")
    every = rules["snapshot_every"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise UserError(f"snapshot_every={every!r}; it must be a whole number of steps, or 0 for none")
    if bool(every) != bool(rules["snapshot_dir"]):
        raise UserError("snapshot_every=… and snapshot_dir=… belong together: how often the servers save themselves, and where")
    rules["snapshot_dir"] = os.path.abspath(os.fspath(rules["snapshot_dir"])) if rules["snapshot_dir"] else ""
    if rules["on_worker_loss"] not in ("stop", "continue"):
        raise UserError(f"on_worker_loss={rules['on_worker_loss']!r}; write 'stop' or 'continue'")
    wait = "sync" if mode.wait == "ssp" and rules["staleness"] == 0 else mode.wait  # nobody ahead of anyone is sync
    return {"wait": wait, **rules}


class ServedStore(KVStore):
    """A store on servers. `create` makes it in a job that `allhands launch -s` has given servers.

    Args:
        mode: what `create` was given.
        rank, num_workers: who takes part.
        where: each server's announcement.
        rules: what all workers must agree on.
        number: how many stores this worker has made before; the same store has the same on all workers.
        life: of this process; another one after it was started again.
        transport: "auto", or one of `TRANSPORTS`.
        find: gives a server's present announcement, for one that was started again.

    Attributes:
        links: the servers.
    """

    def __init__(self, mode: Mode, rank: int, num_workers: int, where: Sequence[Mapping[str, Any]], rules: dict[str, Any],
                 number: int, life: str = _LIFE, transport: str = "auto",
                 find: Callable[[int], dict[str, Any]] | None = None) -> None:  # fmt: skip
        super().__init__(mode, rank, num_workers)
        self.rules = rules
        self._sync = rules["wait"] == "sync"
        self._board = Board()
        self._pieces: dict[str, list[Piece]] = {}
        self._metas = itertools.count(1)
        self._tables: dict[str, list[Piece]] = {}
        self._table_versions: dict[str, int] = defaultdict(int)
        self._unread: set[str] = set()
        self._complete: list[str] = []
        self._codec: Codec | None = None
        self._compressors: dict[int, Compressor] = {}
        self._closed = False
        self._find, self._transport = find, transport
        self._said = said = {
            "rank": rank,
            "rules": rules,
            "life": life,
            "store": number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self.links = [Link(index, one, self._board, said, transport) for index, one in enumerate(where)]
        for link in self.links:
            link.comes_back = find is not None and rules["snapshot_every"] > 0
        self._again = any(link.again for link in self.links)
        atexit.register(self._leave)

    @classmethod
    def connect(cls, mode: Mode, options: Mapping[str, Any]) -> ServedStore:
        """Find the job's servers through its store, and connect to all of them.

        Raises:
            UserError: an option, or a variable of the job, is wrong.
            WorldError: a server does not appear, or cannot be reached.
        """
        from torch.distributed import DistStoreError, TCPStore

        rules = _options(mode, options)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(
                f"ALLHANDS_NUM_SERVERS is set, but {', '.join(missing)} is not; start the job with `allhands launch -s …`"
            )
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT), wait_for_workers=False)

        def find(number: int) -> dict[str, Any]:
            try:
                found: dict[str, Any] = json.loads(store.get(server_key(number)))
            except (DistStoreError, RuntimeError) as error:
                raise WorldError(f"server {number} has not appeared within {START_TIMEOUT:.0f} s: {error}") from error
            return found

        where = [find(number) for number in range(int(os.environ["ALLHANDS_NUM_SERVERS"]))]
        transport = os.environ.get(TRANSPORT, "auto")
        if transport not in ("auto", *TRANSPORTS):
            raise UserError(f"{TRANSPORT}={transport}; it must be auto, {', '.join(TRANSPORTS)}")
        return cls(
            mode, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), where, rules, next(_numbers), transport=transport,
            find=find,
        )  # fmt: skip

    # ------------------------------------------------------------------ keys

    def declare(
        self, named: Mapping[str, torch.Tensor | RowSparse], complete: bool = False, groups: Mapping[str, int] | None = None
    ) -> None:
        groups = groups or {}
        forms: dict[str, dict[str, Any]] = {}
        for name, value in named.items():
            group, dtype = groups.get(name, 0), dtype_name(name, value.dtype)
            if isinstance(value, RowSparse):
                forms[name] = {"rows": value.rows, "columns": value.columns, "std": value.std, "seed": value.seed}
            else:
                forms[name] = {"shape": list(value.shape), "count": value.numel()}
            forms[name] |= {"dtype": dtype, "group": group}
        placed = self.links[0].ask("declare", keys=forms, complete=complete)["placed"]
        dense = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        for name in named:
            pieces = [Piece(*piece) for piece in placed[name]]
            if name in dense:
                self._pieces[name] = pieces
                self.shapes[name] = (dense[name].shape, dense[name].dtype)
            else:
                self._tables[name] = pieces
                self.tables[name] = named[name]  # type: ignore[assignment]
        if complete:
            self._complete = sorted(dense)
        for link in self.links:
            here = {piece.number: (name, piece) for name in dense for piece in self._pieces[name] if piece.server == link.number}
            chunks = [
                [number, name, piece.start, piece.stop, forms[name]["dtype"], forms[name]["group"], complete]
                for number, (name, piece) in here.items()
            ]
            link.versions |= {int(number): version for number, version in link.ask("create", chunks=chunks)["versions"].items()}
            link.share({number: (piece.stop - piece.start, dense[name].dtype) for number, (name, piece) in here.items()})
            if len(dense) < len(named):
                tables = [
                    [self._tables[name][link.number].number, name, value.rows, value.columns, value.std, value.seed,
                     forms[name]["dtype"], forms[name]["group"]]
                    for name, value in named.items() if isinstance(value, RowSparse)
                ]  # fmt: skip
                link.ask("tables", tables=tables)
            if self.rank == 0 and not self._again:
                for number, (name, piece) in here.items():
                    values = _flat(dense[name])[piece.start : piece.stop].clone()
                    link.put(pack(Kind.INIT, chunk=number, nbytes=values.nbytes), values)
        for link, pending in [
            (
                link,
                link.begin(
                    "ready", chunks=[one.number for name in dense for one in self._pieces[name] if one.server == link.number]
                ),
            )
            for link in self.links
        ]:
            link.answer(pending, "init: the first values, which worker 0 gives")
        if self._again:
            self._join(list(dense))

    def _join(self, names: Sequence[str]) -> None:
        """Take part again, from a round on that no server has closed."""
        while True:
            versions: dict[int, int] = {}
            for link in self.links:
                versions |= {int(number): version for number, version in link.ask("versions")["versions"].items()}
            highest = max((versions[one.number] for name in names for one in self._pieces[name]), default=0)
            begins = dict.fromkeys(names, highest + 2)
            try:
                for link in self.links:
                    link.ask("join", begins=begins)
                break
            except UserError as error:
                if str(error) != "late":
                    raise
        for name in names:
            for piece in self._pieces[name]:
                self.links[piece.server].versions[piece.number] = highest + 1 if self._sync else versions[piece.number]

    # ------------------------------------------------------------------ rounds

    def _begin(self, names: Sequence[str], share: Share, groups: Any, clip: float | None,
               rows: Sequence[str] = ()) -> tuple[int, int, list[Link]]:  # fmt: skip
        """Announce a step to the servers that have a part of it; its number, that of its announcement, and those servers."""
        counts: dict[int, int] = defaultdict(int)
        for name in names:
            for piece in self._pieces[name]:
                counts[piece.server] += 1
        for _ in rows:
            for link in self.links:
                counts[link.number] += 1
        version = max((self.links[one.server].versions[one.number] for name in names for one in self._pieces[name]), default=0)
        version = max([version, *(self._table_versions[name] for name in rows)])
        # The same on all workers, also on one that came later; calls over other keys have other numbers.
        step = (version + 1 << 32) + zlib.crc32("\n".join(sorted([*names, *rows])).encode())
        meta = next(self._metas) & 0xFFFFFFFF
        involved = [link for link in self.links if counts[link.number]]
        for link in involved:
            link.put(message({
                "op": "step", "meta": meta, "step": step, "weight": share.weight, "expected": share.expected, "groups": groups,
                "clip": clip, "chunks": counts[link.number], "idle": share.weight == 0 and groups is None,
            }), priority=1 << 60)  # fmt: skip
        return step, meta, involved

    def _send(self, values: Mapping[str, torch.Tensor], outs: Mapping[str, torch.Tensor] | None, share: Share, groups: Any = None,
              clip: float | None = None, priority: int | None = None,
              copies: bool = False) -> tuple[int, list[Link], Pending]:  # fmt: skip
        """Push all values; with `outs`, ask for the new ones, which go there."""
        names = list(values)
        flat = {name: _flat(value) for name, value in values.items()}
        if copies:
            flat = {name: value.clone() if value.data_ptr() == values[name].data_ptr() else value for name, value in flat.items()}
        encoded = (
            {one.number: self._encoded(one, name, flat[name]) for name in names for one in self._pieces[name]}
            if self._codec
            else {}
        )
        step, meta, involved = self._begin(names, share, groups, clip)
        pending = Pending(sum(len(self._pieces[name]) for name in names) if outs is not None else 0)
        for order, name in enumerate(names):
            for piece in self._pieces[name]:
                link = self.links[piece.server]
                if outs is not None:
                    link.targets[piece.number] = (outs[name][piece.start : piece.stop], pending)
                data = encoded.get(piece.number)
                link.push(
                    piece.number, link.versions[piece.number] + 1, meta, flat[name][piece.start : piece.stop], outs is not None,
                    -order if priority is None else priority, None if data is None else _same(data), copies and not self._sync,
                )  # fmt: skip
                if outs is None:
                    link.versions[piece.number] += 1
        return step, involved, pending

    def _encoded(self, piece: Piece, name: str, flat: torch.Tensor) -> torch.Tensor:
        assert self._codec is not None
        compressor = self._compressors.get(piece.number)
        if compressor is None:
            compressor = self._compressors[piece.number] = Compressor(self._codec, piece.stop - piece.start)
        return compressor.compress(flat[piece.start : piece.stop], name)

    def _clip(self, step: int, involved: Sequence[Link], pending: Pending, clip_norm: float) -> None:
        """Find the norm of all servers' parts, and tell them by what to multiply."""

        def known() -> bool:
            return pending.left == 0 or all(step in link.squares for link in involved)

        self._board.wait(known, lambda: self._about("the norm of the gradients"))
        with self._board.changed:
            squares = [link.squares.pop(step, None) for link in involved]
        if any(found is None for found in squares):
            return  # the others closed the step before this worker came into it
        # fsum rounds once, so that the order, and with it the number of servers, changes nothing.
        total = math.fsum(square for found in squares if found for square in found.values())
        for link in involved:
            link.first(message({"op": "commit", "step": step, "scale": clip_factor(total, clip_norm)}))

    def _finish(self, step: int, involved: Sequence[Link], pending: Pending) -> Step:
        """Wait until all values have come."""

        def done() -> bool:
            return pending.left == 0 and all(step in link.done for link in involved)

        self._board.wait(done, lambda: self._about("the other workers' gradients"))
        with self._board.changed:
            told = [link.done.pop(step) for link in involved]
            for link in involved:
                link.squares.pop(step, None)
        workers = min((one["workers"] for one in told), default=self.num_workers)
        staleness = sum(one["staleness"] for one in told) / max(1, len(told))
        return Step(step >> 32, workers, staleness)

    def _about(self, what: str) -> str:
        return f"worker {self.rank} waits for {what}"

    def update(self, grads: Mapping[str, torch.Tensor], outs: Mapping[str, torch.Tensor], share: Share,
               groups: Sequence[Mapping[str, Any]] | None = None, clip_norm: float | None = None) -> Step:  # fmt: skip
        if self.optimizer is None:
            raise UserError("update: the store has no optimizer; call set_optimizer first")
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise UserError(f"clip_norm={clip_norm}; it must be a bound above 0, or None")
        self._usable()
        try:
            return self._update(grads, outs, share, groups, clip_norm)
        except ServerLostError:
            # The gradients belong to weights that are gone; the caller goes on from those of the snapshot.
            step = self._come_back()
            for name, out in outs.items():
                self._pull(name, out, 0)
            return Step(step, self.num_workers)

    def _update(self, grads: Mapping[str, torch.Tensor], outs: Mapping[str, torch.Tensor], share: Share,
                groups: Sequence[Mapping[str, Any]] | None, clip_norm: float | None) -> Step:  # fmt: skip
        rows = {name: grad for name, grad in grads.items() if name in self.tables}
        dense = {name: grad for name, grad in grads.items() if name not in self.tables}
        if rows and clip_norm is not None:
            raise UserError("clip_norm with keys of rows needs a store without servers; leave clip_norm out")
        for name, grad in dense.items():
            self._check_like(name, grad, "the gradient")
        for name, grad in rows.items():
            check_rows(name, grad, self.tables[name])
        for name, out in outs.items():
            self._check_like(name, out, "out")
        told = None if groups is None else [dict(group) for group in groups]
        if not grads:
            if not self._sync:
                for name, out in outs.items():
                    self._pull(name, out, 0)
                return Step(0, 1)
            forms = {name: self.shapes[name] for name in self._complete}
            dense = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in forms.items()}
        elif clip_norm is not None and not self._sync:
            dense, clip_norm = _clipped(dense, share, clip_norm), None
        staged = {name: _room(outs[name] if name in outs else torch.empty_like(dense[name], device="cpu")) for name in dense}
        step, involved, pending = self._send(dense, staged, share, told, clip_norm)
        if clip_norm is not None:
            self._clip(step, involved, pending, clip_norm)
        taken = self._finish(step, involved, pending) if dense else Step(0, self.num_workers)
        for name, grad in rows.items():
            taken = self._push_rows(name, grad.detach().coalesce(), share, told)
        with torch.no_grad():
            for name, out in outs.items():
                if name not in staged:
                    self._pull(name, out, 0)
                elif staged[name].data_ptr() != out.data_ptr():
                    out.copy_(staged[name].view(out.shape))
        return taken

    def reduce(self, grads: Mapping[str, torch.Tensor], share: Share) -> Step:
        if self.optimizer is not None:
            raise UserError("reduce: the store has an optimizer, which would take steps with the gradients; use update")
        self._usable()
        for name, grad in grads.items():
            self._check_like(name, grad, "the gradient")
        staged = {name: _room(grad) for name, grad in grads.items()}
        taken = self._exchange(grads, staged, share)
        with torch.no_grad():
            for name, grad in grads.items():
                if staged[name].data_ptr() != grad.data_ptr():
                    grad.copy_(staged[name].view(grad.shape))
        return taken

    def _push(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None:
        self._usable()
        if self._sync and name in self._unread:
            raise UserError(f"the key '{name}' was pushed already and not pulled since; pull it before the next push")
        self._unread.add(name)
        if name in self.tables:
            self._push_rows(name, value, share, None, wait=False)
        else:
            # The caller may change the value at once; what is sent is a copy.
            self._send({name: value}, None, share, priority=priority, copies=True)

    def _exchange(self, values: Mapping[str, torch.Tensor], staged: Mapping[str, torch.Tensor], share: Share,
                  priority: int | None = None) -> Step:  # fmt: skip
        """Push values, and read the new ones."""
        if any(link.comes_back for link in self.links):
            # Answers may overwrite what must be sent again after a server was lost.
            values = {name: value.clone() for name, value in values.items()}
        while True:
            try:
                return self._finish(*self._send(values, staged, share, priority=priority))
            except ServerLostError:
                self._come_back()

    def _come_back(self) -> int:
        before = max((version for link in self.links for version in link.versions.values()), default=0)
        step = come_back(self)
        if self.rank == 0:
            print(
                f"allhands: a server was lost and has come back; all go on from step {step}, of which there is a snapshot: "
                f"{before - step} finished steps are lost", flush=True,
            )  # fmt: skip
        return step

    def _again_if_lost(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except ServerLostError:
                self._come_back()

    def pushpull(self, key: Key | Sequence[Key], value: Any, out: Any = None, priority: int = 0,
                 weight: float | None = None) -> None:  # fmt: skip
        self._usable()
        given, targets = self._pairs(key, value), self._pairs(key, value if out is None else out)
        if any(name in self.tables for name, _ in given):
            super().pushpull(key, value, out, priority, weight)
            return
        values = {name: self._checked(name, one) for name, one in given}
        outs = {name: list(one) if isinstance(one, (list, tuple)) else [one] for name, one in targets}
        for name, several in outs.items():
            for tensor in several:
                self._check_like(name, tensor, "out")
            if self._sync and name in self._unread:
                raise UserError(f"the key '{name}' was pushed already and not pulled since; pull it before the next push")
        staged = {name: _room(several[0]) for name, several in outs.items()}
        share = Share() if weight is None else Share(weight, 1.0)
        self._exchange(values, staged, share, priority)
        with torch.no_grad():
            for name, several in outs.items():
                for tensor in several:
                    if staged[name].data_ptr() != tensor.data_ptr():
                        tensor.copy_(staged[name].view(tensor.shape))

    def _pull(self, name: str, out: torch.Tensor, priority: int) -> None:
        self._usable()
        self._unread.discard(name)
        self._again_if_lost(lambda: self._pull_once(name, out, priority))

    def _pull_once(self, name: str, out: torch.Tensor, priority: int) -> None:
        staged = _room(out)
        pieces = self._pieces[name]
        pending = Pending(len(pieces))
        for piece in pieces:
            link = self.links[piece.server]
            link.targets[piece.number] = (staged[piece.start : piece.stop], pending)
            link.put(pack(Kind.PULL, chunk=piece.number, round=link.versions[piece.number]), priority=priority)
        self._board.wait(
            lambda: pending.left == 0, lambda: self._about(f"the key '{name}', which other workers have not pushed yet")
        )
        if staged.data_ptr() != out.data_ptr():
            with torch.no_grad():
                out.copy_(staged.view(out.shape))

    # ------------------------------------------------------------------ rows

    def _owners(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.remainder(len(self.links))

    def _push_rows(self, name: str, value: torch.Tensor, share: Share, groups: Any, wait: bool = True) -> Step:
        ids, rows = value._indices()[0].cpu(), value._values().cpu()
        step, meta, involved = self._begin([], share, groups, None, [name])
        self._table_versions[name] += 1
        owners = self._owners(ids)
        for link in self.links:
            mine = owners == link.number
            body = pack_rows(ids[mine], rows[mine])
            if len(body) > LONGEST_ROWS:
                raise UserError(
                    f"a push of {len(body):,} bytes of rows to one server; at most {LONGEST_ROWS:,}: push fewer ids at once"
                )
            number = self._tables[name][link.number].number
            link.put(pack(Kind.PUSH_ROWS, 0, number, meta, self._table_versions[name], len(body)) + body)
        return self._finish(step, involved, Pending(0)) if wait else Step(step >> 32, self.num_workers)

    def _pull_rows(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._usable()
        self._unread.discard(name)
        ids = ids.cpu()
        owners, table, asked = self._owners(ids), self.tables[name], []
        for link in self.links:
            mine = (owners == link.number).nonzero().view(-1)
            if len(mine):
                body = pack_rows(ids[mine], None)
                if max(len(body), len(mine) * table.columns * table.dtype.itemsize) > LONGEST_ROWS:
                    raise UserError(
                        f"row_sparse_pull of {len(ids):,} rows at once is over {LONGEST_ROWS:,} bytes; pull fewer ids at once"
                    )
                request, pending = link.expect()
                number = self._tables[name][link.number].number
                link.put(pack(Kind.PULL_ROWS, 0, number, request, self._table_versions[name], len(body)) + body)
                asked.append((link, mine, pending))
        with torch.no_grad():
            for link, mine, pending in asked:
                data = link.answer(pending, f"rows of '{name}'")
                out[mine.to(out.device)] = torch.frombuffer(data, dtype=table.dtype).view(len(mine), table.columns).to(out.device)

    # ------------------------------------------------------------------ settings, meeting, state

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        for link in self.links:
            link.ask("optimizer", name=spec.name, groups=list(spec.groups))
            link.adds = True

    def _set_compression(self, options: dict[str, Any]) -> None:
        pull = options.pop("pull", None)
        push = options
        self_codec = codec_from(push)
        if pull is None:  # the threshold of 2bit is one for gradients, and not for changes of weights
            pull = {"type": "none"} if push["type"] == "2bit" else dict(push)
        elif isinstance(pull, str):
            pull = {"type": pull}
        down = codec_from(pull)
        for link in self.links:
            link.ask("compression", push=push, pull=dict(pull))
            link.down_codec = None if pull["type"] == "none" else down
            link.adds = self.optimizer is not None
        self._codec = None if push["type"] == "none" else self_codec
        self._compressors.clear()

    def barrier(self) -> None:
        self._usable()
        self._again_if_lost(lambda: self.links[0].ask("barrier"))

    def state(self) -> StoreState:
        self._usable()
        found: dict[str, torch.Tensor] = {}
        for link in self.links:
            number, pending = link.expect()
            link.first(message({"op": "state", "id": number, "weights": False}))
            found |= {f"{link.number}\t{name}": value for name, value in link.answer(pending, "state").items()}
        step = max((version for link in self.links for version in link.versions.values()), default=0)
        return put_together(found, step, self._pieces, self._tables, self.shapes)

    def load_state(self, state: StoreState) -> None:
        self._usable()
        if self.rank == 0:
            for link, part in zip(self.links, taken_apart(state, self._pieces, self._tables, len(self.links)), strict=True):
                number, pending = link.expect()
                data = save(part)
                link.put(pack(Kind.STATE, meta=number, nbytes=len(data)) + data)
                link.answer(pending, "load_state")
        self.barrier()

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has left over on this worker, by key; to be kept in its checkpoint."""
        found = {}
        for name, pieces in self._pieces.items():
            parts = [self._compressors[one.number].state() for one in pieces if one.number in self._compressors]
            if len(parts) == len(pieces) and parts:
                found[name] = torch.cat(parts)
        return found

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `residuals` gave."""
        if self._codec is None:
            raise UserError("load_residuals: the store does not compress; call set_gradient_compression first")
        for name, values in residuals.items():
            self._known(name)
            for piece in self._pieces[name]:
                compressor = self._compressors.setdefault(piece.number, Compressor(self._codec, piece.stop - piece.start))
                compressor.load(values[piece.start : piece.stop])

    def _usable(self) -> None:
        if self._closed:
            raise UserError("this store was closed; create another")
        if self._board.failure is not None:
            raise type(self._board.failure)(*self._board.failure.args) from self._board.failure

    def close(self) -> None:
        """Leave the store; the others go on without this worker."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._leave)
            for link in self.links:
                link.close()

    def _leave(self) -> None:
        """At the normal end of a script; after an error the servers see the connection end without a goodbye."""
        if getattr(sys, "last_type", None) is None:
            self.close()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in order, on the CPU; the tensor's own memory where that is so already."""
    return tensor.detach().to("cpu").contiguous().view(-1)


def _room(out: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor on the CPU for the numbers of `out`; its own memory where possible."""
    if out.device.type == "cpu" and out.is_contiguous():
        return out.detach().view(-1)
    return torch.empty(out.numel(), dtype=out.dtype)


def _same(data: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: data


def _clipped(grads: Mapping[str, torch.Tensor], share: Share, clip_norm: float) -> dict[str, torch.Tensor]:
    """This worker's own gradients, bounded; without waiting for others there is no norm of all."""
    factor = 1.0 if share.expected is None or not share.weight else share.expected / share.weight
    square = math.fsum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads.values())
    scale = clip_factor(square * factor * factor, clip_norm)
    return {name: grad if scale == 1.0 else grad * scale for name, grad in grads.items()}
