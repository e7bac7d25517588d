"""The columns: every registered strategy, in the sizes and settings that have code of their own."""

from __future__ import annotations

from typing import Any

from allhands import DDP, LocalSGD, Mesh, Pipeline, Tensor
from allhands.strategies import STRATEGIES, KVStore
from tests.conformance.table import Column, Row

# Trains other weights by design, or in rounds of clients; their own tests compare them with what
# they promise.
OTHER = {"federated": "clients train for themselves between rounds"}


def _tensor(row: Row) -> Any:
    return Tensor(plan=dict(row.plan)) if row.plan else Tensor()


def _mesh(**degrees: Any) -> Any:
    def make(row: Row) -> Any:
        parts: dict[str, Any] = {}
        if degrees.get("tp", 1) > 1:
            parts["tensor"] = _tensor(row)
        if degrees.get("pp", 1) > 1:
            parts["pipeline"] = Pipeline(microbatches=2)
        return Mesh(**degrees, **parts)

    return make


_CHOSEN = [
    Column("single", lambda row: False, workers=1, shares=1, covers="single"),
    Column(
        "single, accumulate 2",
        lambda row: False,
        workers=1,
        shares=1,
        accumulate=2,
        covers="single",
    ),
    Column(
        "single, accumulate 3",
        lambda row: False,
        workers=1,
        shares=1,
        accumulate=3,
        covers="single",
    ),
    Column("ddp x 2", lambda row: "ddp", covers="ddp"),
    Column("ddp x 2, accumulate 2", lambda row: "ddp", accumulate=2, covers="ddp"),
    Column("ddp x 3", lambda row: "ddp", workers=3, shares=3, covers="ddp"),
    Column("ddp x 2, sharded state", lambda row: DDP(optimizer_state="sharded"), covers="ddp"),
    Column("kvstore x 2", lambda row: "kvstore", covers="kvstore"),
    Column("kvstore x 2, worker's update", lambda row: KVStore(update="worker"), covers="kvstore"),
    Column("kvstore x 2, 1 server", lambda row: KVStore(servers=1), servers=1, covers="kvstore"),
    Column(
        "kvstore x 2, 2 servers, worker's update",
        lambda row: KVStore(servers=2, update="worker"),
        servers=2,
        covers="kvstore",
    ),
    Column("local_sgd(every=1) x 2", lambda row: LocalSGD(every=1), covers="local_sgd"),
    Column("fsdp x 2", lambda row: "fsdp", covers="fsdp"),
    Column("fsdp x 2, accumulate 2", lambda row: "fsdp", accumulate=2, covers="fsdp"),
    Column("tensor x 2", _tensor, shares=1, covers="tensor"),
    Column(
        "pipeline x 2", lambda row: Pipeline(microbatches=2), shares=1, pieces=2, covers="pipeline"
    ),
    Column("dp 2 x shard 2", _mesh(dp={"replicate": 2, "shard": 2}), workers=4, shares=4),
    Column("dp 2 x tp 2", _mesh(dp=2, tp=2), workers=4),
    Column("pp 2 x dp 2", _mesh(pp=2, dp=2), workers=4, pieces=2),
]
# One process with several GPUs: there is no such thing on processors.
DP = Column("dp", lambda row: "dp", workers=1, shares=1, covers="dp")
# A strategy that is registered later is tried with its default settings on two workers.
_LATER = [
    Column(f"{name} x 2", lambda row, name=name: name, covers=name)
    for name in STRATEGIES
    if name not in OTHER and name not in {column.covers for column in [*_CHOSEN, DP]}
]
COLUMNS = {column.name: column for column in [*_CHOSEN, *_LATER]}
