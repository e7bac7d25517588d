"""`HostStore`: the workers of one host add up their gradients among themselves, and the first of
them speaks to the servers.

A worker of eight on a host would otherwise send eight times what the host has to say. Chen et al.,
"A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters"
(OSDI 2020), describe the scheme.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch

from allhands.comm import all_gather_rows
from allhands.comm.flat_layout import FlatLayout
from allhands.errors import AllhandsError, UserError, WorldError
from allhands.kvstore.host_group import HostGroup
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.served import ServedStore
from allhands.kvstore.shared_calls import SharedCalls
from allhands.kvstore.store import KVStore, Share, Step
from allhands.kvstore.store_modes import Mode
from allhands.kvstore.store_state import StoreState, pack_state, part_of, unpack_state
from allhands.kvstore.values import RowSparse
from allhands.launch import worker
from allhands.world import World, init

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_group: HostGroup | None = None


def connect(mode: Mode, options: Mapping[str, Any]) -> KVStore:
    """The store of a job with servers; where each host has one worker it is a `ServedStore`.

    Raises:
        UserError: workers that are lost are to be started again, which cannot be here.
    """
    world = init()
    sizes = torch.cat(
        all_gather_rows(torch.tensor([world.local_world_size], device=world.device), world)
    )
    several = bool((sizes > 1).any())
    if several and os.environ.get("ALLHANDS_ON_WORKER_FAILURE") == "restart":
        raise UserError(
            f"create('{mode.name}') with --on-worker-failure restart: the workers of a host are "
            "one member of the store, which one of them alone cannot join again; write "
            "create('dist_sync'), where each worker is a member, or --on-worker-failure continue, "
            "where the other hosts go on"
        )

    def served() -> ServedStore:
        return ServedStore.connect(mode, options)

    own = served()
    return HostStore(own, _group_of(world), served) if several else own


def _group_of(world: World) -> HostGroup:
    """The workers of this host, which stay the same as long as the process lives."""
    global _group
    if _group is None:
        from torch.distributed import PrefixStore, TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=300), wait_for_workers=False
        )
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        here = PrefixStore(f"allhands/kvstore/{life}/host/{world.node_rank}", store)
        here.set(f"rank/{world.local_rank}", str(world.rank))
        ranks = [int(here.get(f"rank/{local}")) for local in range(world.local_world_size)]
        _group = HostGroup(
            here, ranks, world.rank, float(os.environ.get("ALLHANDS_KVSTORE_LEASE", "10"))
        )
    return _group


class HostStore(KVStore):
    """A store on servers whose members are hosts: what the workers of a host push is added up
    before it is sent, once.

    All workers of a host make the same calls in the same order; each call begins by comparing them.
    `close`, also at the normal end of a script, is the exception: a worker that has no more batches
    takes part, with no samples, in the steps of the others. A `RowSparse` key is no part of this:
    rows travel between each worker and the servers, as in "dist_sync".

    In `Step.workers` the hosts are counted. The loss of a worker ends its host's part, with a
    `WorldError` on the others.

    Args:
        own: this worker's connections to the servers; those of a worker that does not lead are
            closed here.
        group: the workers of the host.
        served: connects anew, for rows.
    """

    def __init__(
        self, own: ServedStore, group: HostGroup, served: Callable[[], ServedStore]
    ) -> None:
        super().__init__(own.mode, own.rank, own.num_workers)
        self._group, self._served, self._closed = group, served, False
        self._dense: ServedStore | None = own if group.leads else None
        self._rows: ServedStore | None = None
        self._layouts: dict[tuple[str, ...], list[tuple[torch.dtype, FlatLayout]]] = {}
        self._calls = SharedCalls(
            "the workers of a host",
            group.ranks,
            group.place,
            group.all_of,
            len(group.stores),
            group.stores,
        )
        group.stores.append(self)
        if self._dense is None:
            own.close()  # the servers count on it no more
        else:
            atexit.unregister(own._leave)  # not before the others of this host have left
        atexit.register(self._leave)

    # ---------------------------------------------- what the workers of the host say to one another

    def _meet(self, call: str, about: Any, weight: float = 0.0) -> tuple[Any, list[float]]:
        """What all workers of the host do in this call, and their weights."""
        if self._closed:
            raise UserError(f"{call}: this store was closed; create another")
        return self._calls.follow(call, about, weight)

    def _lead(self, work: Callable[[ServedStore], Any]) -> list[float]:
        return self._group.lead(lambda: work(self._dense) if self._dense is not None else None)

    def _place(
        self, names: Sequence[str], what: str, device: str
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Memory for the values of these keys: a tensor a dtype, padded for the group, and its
        parts by key."""
        where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else _CPU
        wholes, views = [], dict[str, torch.Tensor]()
        for dtype, layout in self._layouts_of(tuple(names)):
            whole = self._group.room(what, self._group.padded(layout.length), dtype, where)
            whole[layout.length :].zero_()
            wholes.append(whole)
            views |= layout.named(whole)
        return wholes, views

    def _layouts_of(self, names: tuple[str, ...]) -> list[tuple[torch.dtype, FlatLayout]]:
        """How the values of these keys lie in one tensor for each dtype."""
        if names not in self._layouts:
            alike: dict[torch.dtype, dict[str, torch.Tensor]] = defaultdict(dict)
            for name in names:
                shape, dtype = self.shapes[name]
                alike[dtype][name] = torch.empty(shape, dtype=dtype, device="meta")
            self._layouts[names] = [(dtype, FlatLayout(own)) for dtype, own in alike.items()]
        return self._layouts[names]

    @torch.no_grad()
    def _add_up(
        self, names: Sequence[str], values: Mapping[str, torch.Tensor], device: str
    ) -> dict[str, torch.Tensor]:
        """The host's sums by key, on the leader; values that this worker does not have count as
        zeros."""
        wholes, views = self._place(names, "own", device)
        for name, view in views.items():
            if name in values:
                view.copy_(values[name])
            else:
                view.zero_()
        totals, sums = self._place(names, "sums", device)
        for whole, total in zip(wholes, totals, strict=True):
            self._group.add_up(whole, total)
        return sums

    @torch.no_grad()
    def _spread(
        self, names: Sequence[str], what: str, device: str, outs: Mapping[str, torch.Tensor]
    ) -> None:
        """Give the leader's values to all workers."""
        wholes, views = self._place(names, what, device)
        for whole in wholes:
            self._group.spread(whole)
        for name, out in outs.items():
            out.copy_(views[name])

    # ------------------------------------------------------------------ rounds

    def update(
        self,
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
        share: Share,
        groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = None,
    ) -> Step:
        self._check_optimizer("update")
        dense, rows = self._check_gradients(grads)
        if rows and dense and clip_norm is not None:
            raise UserError(
                f"clip_norm over keys of rows and others in create('{self.type}'), where rows do "
                "not travel with the host's sum; write create('dist_sync'), or leave clip_norm out"
            )
        self._check_all(outs, "out")
        about = {
            "keys": sorted(dense),
            "outs": sorted(outs),
            "rows": sorted(rows),
            "groups": groups,
            "clip": clip_norm,
            "expected": share.expected,
            "device": _device_of([*dense.values(), *outs.values()]),
        }
        shared, weights = self._meet("update", about, share.weight)
        for name in sorted(set(outs) - set(shared["outs"])):
            raise UserError(
                f"update: the other workers of this host do not read the key '{name}'; read the "
                "same keys on all"
            )
        step = self._update(shared, weights, dense, outs)
        if shared["rows"]:
            assert self._rows is not None
            mine = {name: rows.get(name, _no_rows(self.tables[name])) for name in shared["rows"]}
            step = self._rows.update(
                mine, {}, Share(share.weight, shared["expected"]), shared["groups"], shared["clip"]
            )
        return step

    def _update(
        self,
        about: Any,
        weights: Sequence[float],
        grads: Mapping[str, torch.Tensor],
        outs: Mapping[str, torch.Tensor],
    ) -> Step:
        keys, read, device = about["keys"], about["outs"], about["device"]
        if not keys and about["rows"]:
            return Step(0, 1)
        sums = self._add_up(keys, grads, device)
        _, new = self._place(read, "new", device)
        share = Share(sum(weights), about["expected"])
        numbers = self._lead(
            lambda store: astuple(store.update(sums, new, share, about["groups"], about["clip"]))
        )
        self._spread(read, "new", device, outs)
        return Step(*map(int, numbers))

    def reduce(self, grads: Mapping[str, torch.Tensor], share: Share) -> Step:
        self._check_all(grads, "the gradient")
        about = {
            "keys": sorted(grads),
            "expected": share.expected,
            "device": _device_of(grads.values()),
        }
        return self._reduce(*self._meet("reduce", about, share.weight), grads)

    def _reduce(
        self, about: Any, weights: Sequence[float], grads: Mapping[str, torch.Tensor]
    ) -> Step:
        keys, device = about["keys"], about["device"]
        sums = self._add_up(keys, grads, device)
        numbers = self._lead(
            lambda store: astuple(store.reduce(sums, Share(sum(weights), about["expected"])))
        )
        self._spread(keys, "sums", device, grads)
        return Step(*map(int, numbers))

    def _push(self, name: str, value: torch.Tensor, priority: int, share: Share) -> None:
        if name in self.tables:
            assert self._rows is not None
            self._rows._push(name, value, priority, share)
        else:
            about = {
                "keys": [name],
                "expected": share.expected,
                "device": _device_of([value]),
                "priority": priority,
            }
            self._push_sum(*self._meet("push", about, share.weight), {name: value})

    def _push_sum(
        self, about: Any, weights: Sequence[float], values: Mapping[str, torch.Tensor]
    ) -> None:
        sums, (name,) = self._add_up(about["keys"], values, about["device"]), about["keys"]
        share = Share(sum(weights), about["expected"])
        self._lead(lambda store: store._push(name, sums[name], about["priority"], share))

    def _pull(self, name: str, out: torch.Tensor, priority: int) -> None:
        about = {"keys": [name], "device": _device_of([out]), "priority": priority}
        self._pull_for_all(self._meet("pull", about)[0], {name: out})

    def _pull_for_all(self, about: Any, outs: Mapping[str, torch.Tensor]) -> None:
        (name,), device = about["keys"], about["device"]
        _, new = self._place([name], "new", device)
        self._lead(lambda store: store._pull(name, new[name], about["priority"]))
        self._spread([name], "new", device, outs)

    def _pull_rows(self, name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
        assert self._rows is not None
        self._rows._pull_rows(name, ids, out)

    # ------------------------------------------------------------------ keys, settings, state

    def declare(
        self,
        named: Mapping[str, torch.Tensor | RowSparse],
        complete: bool = False,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        dense = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        rows = {name: value for name, value in named.items() if isinstance(value, RowSparse)}
        forms = {
            name: f"shape {list(value.shape)} of {value.dtype}" for name, value in dense.items()
        }
        forms |= {name: repr(value) for name, value in rows.items()}
        self._meet(
            "declare", [[name, forms[name], (groups or {}).get(name, 0)] for name in sorted(forms)]
        )
        if dense:
            self._lead(lambda store: store.declare(dense, complete, groups))
            self.shapes |= {name: (value.shape, value.dtype) for name, value in dense.items()}
        if rows:
            if self._rows is None:
                self._rows = self._served()
                if self.optimizer is not None:
                    self._rows.set_optimizer(self.optimizer)
            self._rows.declare(rows, groups=groups)
            self.tables |= rows

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        self._meet("set_optimizer", [spec.name, list(spec.groups)])
        self._lead(lambda store: store.set_optimizer(spec))
        if self._rows is not None:
            self._rows.set_optimizer(spec)

    def _set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        self._meet("set_gradient_compression", [push, pull])
        self._lead(lambda store: store.set_gradient_compression({**push, "pull": pull}))

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has left over on this host, by key, on its leader; nothing on the
        others."""
        return {} if self._dense is None else self._dense.residuals()

    def _compresses(self) -> bool:
        return self._dense is None or self._dense._compresses()

    def _load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        if self._dense is not None:
            self._dense.load_residuals(residuals)
        elif residuals:
            raise UserError(
                "load_residuals: the host's sum is compressed by its first worker, "
                f"{self._group.ranks[0]}; give them to it"
            )

    def barrier(self) -> None:
        self._meet("barrier", None)
        self._lead(lambda store: store.barrier())
        if self._rows is not None:
            self._rows.barrier()

    def state(self) -> StoreState:
        self._meet("state", None)
        found: list[bytes] = []
        self._lead(lambda store: found.append(pack_state(store.state())))
        state = unpack_state(self._group.spread_bytes(found[0] if found else None))
        if self._rows is not None:
            rows = self._rows.state()
            state.tensors |= rows.tensors
            state.numbers |= rows.numbers
        return state

    def load_state(self, state: StoreState) -> None:
        self._meet("load_state", [state.step, sorted({*state.tensors, *state.numbers})])
        self._lead(
            lambda store: store.load_state(part_of(state, lambda name: name not in self.tables))
        )
        if self._rows is not None:
            self._rows.load_state(part_of(state, self.tables.__contains__))

    # ------------------------------------------------------------------ the end

    def lost(self, error: WorldError) -> None:
        """A worker of this host is lost; called by a thread of the group."""
        for store in (self._dense, self._rows):
            if store is not None and not store._closed:
                store._wait_state.fail(error)
                for link in store.links:
                    link.abandon()

    def close(self) -> None:
        """Leave the store, when all workers of the host do; takes part in the steps of the others
        until then, with no samples."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self._rows is not None:
            self._rows.close()
        self._calls.leave(lambda: self._group.wait_state.failure is not None)
        if self._dense is not None:
            self._dense.close()

    def idle(self, about: Any) -> bool:
        """Whether an `update` is that of a worker that has no keys."""
        return not about["keys"] and not about["rows"]

    def take_part(self, call: str, about: Any, weights: Sequence[float]) -> None:
        """Do what the others do, with nothing of this worker's own."""
        if call == "update":
            self._update(about, weights, {}, {})
        elif call == "reduce":
            self._reduce(about, weights, {})
        elif call == "push":
            self._push_sum(about, weights, {})
        else:
            self._pull_for_all(about, {})

    def _leave(self) -> None:
        """At the normal end of a script; after an error the others see the beats, and the
        connections, end."""
        if getattr(sys, "last_type", None) is None and not worker.exit_code:
            try:
                self.close()
            except AllhandsError as error:
                _log.warning("leaving the store: %s", error)


def _device_of(values: Iterable[torch.Tensor]) -> str:
    return "cuda" if any(value.device.type == "cuda" for value in values) else "cpu"


def _no_rows(table: RowSparse) -> torch.Tensor:
    ids = torch.empty(1, 0, dtype=torch.int64)
    none = torch.empty(0, table.columns, dtype=table.dtype)
    return torch.sparse_coo_tensor(
        ids, none, (table.rows, table.columns), is_coalesced=True, check_invariants=False
    )
