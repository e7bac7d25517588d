"""The ways in which a model may be trained on a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from allhands.strategies import (
    DDP,
    FSDP,
    KVStore,
    LocalSGD,
    Mesh,
    Pipeline,
    Single,
    Strategy,
    Tensor,
)
from allhands.strategies.degrees import Degrees


@dataclass(frozen=True)
class Candidate:
    """One way.

    Attributes:
        strategy: its settings.
        lines: its name and options; of a mesh, the section `mesh` of a run file, and `strategy`
            where its parts have settings.
        recompute: whether layers are computed again in the backward pass, or which, as
            ``train(activation_checkpointing=…)`` takes it.
    """

    strategy: Strategy
    lines: dict[str, Any]
    recompute: bool | str | list[str] = False

    @property
    def name(self) -> str:
        """It in a few words."""
        options = [_short(key, value) for key, value in self.lines.items() if key != "name"]
        words = [str(self.lines["name"]), *options, *(["recompute"] if self.recompute else [])]
        return " ".join(words)

    @property
    def sections(self) -> dict[str, Any]:
        """What a run file says of it."""
        if not isinstance(self.strategy, Mesh):
            return {"strategy": self.lines}
        mesh = {key: one for key, one in self.lines.items() if key not in ("name", "strategy")}
        return {key: self.lines[key] for key in self.lines if key == "strategy"} | {"mesh": mesh}

    def family(self, gpus: int) -> str:
        """It without numbers, which change with the number of workers: ``tensor x ddp``."""
        if not isinstance(self.strategy, Mesh):
            return replace(self, recompute=False).name
        degrees = self.degrees(gpus)
        axes = {
            "pipeline": degrees.pp,
            "tensor": degrees.tp,
            "fsdp": degrees.shard,
            "ddp": degrees.replicate,
        }
        return " x ".join(name for name, count in axes.items() if count > 1)

    def degrees(self, gpus: int) -> Degrees:
        """How many workers lie along each axis."""
        if hasattr(self.strategy, "degrees_for"):
            found: Degrees = self.strategy.degrees_for(gpus)
            return found
        return Degrees(replicate=gpus)


def candidates(gpus: int, per_host: int, servers: int = 0) -> Iterator[Candidate]:
    """What to look at: each strategy alone, and its products with others where there are several
    hosts.

    Args:
        gpus: how many.
        per_host: GPUs of a host, which tensor parallelism stays within.
        servers: how many parameter servers to look at beside.
    """
    for strategy, lines in _strategies(gpus, per_host):
        yield Candidate(strategy, lines)
    if servers and gpus > 1:
        for mode in ("sync", "async"):
            lines = {"name": "kvstore", "mode": mode, "servers": servers}
            yield Candidate(KVStore(mode, servers=servers), lines)


def _strategies(gpus: int, per_host: int) -> Iterator[tuple[Strategy, dict[str, Any]]]:
    if gpus == 1:
        yield Single(), {"name": "single"}
        return
    yield DDP(), {"name": "ddp"}
    yield DDP(optimizer_state="sharded"), {"name": "ddp", "optimizer_state": "sharded"}
    yield FSDP(), {"name": "fsdp"}
    yield KVStore(), {"name": "kvstore"}
    rare = LocalSGD()
    yield rare, {"name": "local_sgd", "every": rare.every}
    within = min(gpus, per_host)
    hosts = gpus // within
    whole = hosts * within == gpus and hosts > 1
    if whole and within > 1:
        dp = {"replicate": hosts, "shard": within}
        yield Mesh(dp=dp), {"name": "mesh", "dp": dp}
    if gpus <= per_host:
        yield Tensor(), {"name": "tensor"}
        yield Pipeline(), {"name": "pipeline"}
    if not whole:
        return
    if within > 1:
        yield Mesh(dp=hosts, tp=within), {"name": "mesh", "dp": hosts, "tp": within}
        dp = {"replicate": 1, "shard": hosts}
        yield Mesh(dp=dp, tp=within), {"name": "mesh", "dp": dp, "tp": within}
    stages = next((n for n in (8, 4, 2) if n <= gpus and gpus % n == 0), 1)
    copies = gpus // stages
    if copies == 1:
        yield Pipeline(), {"name": "pipeline"}
    elif stages > 1:
        yield Mesh(pp=stages, dp=copies), {"name": "mesh", "pp": stages, "dp": copies}


def _short(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {one}" for name, one in value.items() if one != 1)
    return value if isinstance(value, str) else f"{key} {value}"
