"""What to start, and the variables that tell each worker who it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from allhands.launch import horovod_alias
from allhands.launch.protocol import MARK
from allhands.wire import TOKEN
from allhands.world.group import JOINS
from allhands.world.regroup import ELASTIC

# What a parameter-server process runs.
SERVER = "allhands.kvstore.parameter_server"
# What the launcher does when a worker fails, and how often this very process was started again for
# that.
ON_WORKER_FAILURE = "ALLHANDS_ON_WORKER_FAILURE"
WORKER_RESTART = "ALLHANDS_WORKER_RESTART"
SERVER_RESTART = "ALLHANDS_SERVER_RESTART"
# By default a thread of PyTorch's ends a process whose peer is gone, tells all others through the
# store to end too, and before that keeps the process from calling collectives for a minute.
_ELASTIC_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Connections are made with the group, and not when an operation first needs them.
    "NCCL_RUNTIME_CONNECT": "0",
}


@dataclass(frozen=True)
class Command:
    """What every worker runs.

    Attributes:
        kind: "script" (a Python file, or a folder or zip file with `__main__.py`), "module" (as
            `python -m`), or "program" (anything else that can be executed).
        target: the path, module name or program.
        args: its arguments, passed on unchanged.
    """

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()

    def task(self) -> dict[str, Any]:
        """The command as the agent expects it."""
        if self.kind == "program":
            return {"program": [self.target, *self.args]}
        return {self.kind: self.target, "args": list(self.args)}


def environment(
    rank: int,
    world_size: int,
    *,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    address: str,
    port: int,
    run_id: str,
    restarts: int = 0,
    servers: int = 0,
) -> dict[str, str]:
    """The variables of one worker: torchrun's, so that `allhands.init()` and plain
    torch.distributed both understand.

    TORCHELASTIC_USE_AGENT_STORE makes torch connect to the store at `address:port` instead of
    opening one in rank 0.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "ALLHANDS_NUM_SERVERS": str(servers),
        MARK: "1",
    }


@dataclass(frozen=True)
class HostPart:
    """One host's part of a job.

    Attributes:
        workers: how many ranks run there.
        servers: the numbers of the parameter servers there.
        address: where its processes reach the store.
        defaults: variables that its processes get unless they are set there.
    """

    workers: int
    servers: Sequence[int]
    address: str
    defaults: Mapping[str, str] = field(default_factory=dict)


def tasks_of(
    task: Mapping[str, Any],
    places: Sequence[HostPart],
    port: int,
    run_id: str,
    token: str,
    restarts: int = 0,
    on_worker_failure: str = "stop",
    elastic: bool = False,
    spares: int = 0,
) -> list[list[dict[str, Any]]]:
    """What each host starts: its servers first, then its share of the ranks, which are counted from
    the first host on.

    A server gets the same variables as the workers of its host, with its own number instead of a
    rank. `token` is the job's secret, and `on_worker_failure` what `Recovery` was told, which is
    only told where there are servers. Of the workers, the last `spares` take part once others are
    missing.
    """
    world_size = sum(place.workers for place in places) - spares
    servers = sum(len(place.servers) for place in places)
    shared = {TOKEN: token}
    if servers:
        shared |= {ON_WORKER_FAILURE: on_worker_failure, WORKER_RESTART: "0"}
    if elastic:
        shared[ELASTIC] = str(world_size)
    not_for_servers = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", WORKER_RESTART)
    tasks, rank = [], 0
    for node_rank, place in enumerate(places):

        def env(
            own: int, local: int, node_rank: int = node_rank, place: HostPart = place
        ) -> dict[str, str]:
            is_spare = own >= world_size
            of_world = min(place.workers, max(1, world_size - (own - local)))
            return shared | environment(
                own,
                world_size + is_spare * spares,
                local_rank=local,
                local_world_size=place.workers if is_spare else of_world,
                node_rank=node_rank,
                address=place.address,
                port=port,
                run_id=run_id,
                restarts=restarts,
                servers=servers,
            )

        there: list[dict[str, Any]] = []
        for number in place.servers:
            own = {name: value for name, value in env(0, 0).items() if name not in not_for_servers}
            own |= {"ALLHANDS_SERVER": str(number), SERVER_RESTART: "0"}
            there.append(
                {
                    "module": SERVER,
                    "args": [],
                    "rank": -1 - number,
                    "env": own,
                    "defaults": place.defaults,
                }
            )
        defaults = {**(_ELASTIC_DEFAULTS if elastic else {}), **place.defaults}
        for local in range(place.workers):
            own = env(rank, local)
            if rank >= world_size:
                own[JOINS] = "1"
            across = [node for node, other in enumerate(places) if other.workers > local]
            horovod = horovod_alias.variables(own, across.index(node_rank), len(across))
            there.append(
                {**task, "rank": rank, "env": own, "defaults": defaults, "horovod": horovod}
            )
            rank += 1
        tasks.append(there)
    return tasks


def further_tasks(
    task: Mapping[str, Any],
    place: HostPart,
    port: int,
    run_id: str,
    token: str,
    restarts: int,
    first_rank: int,
    local_first: int,
    node_rank: int,
    began_with: int,
) -> list[dict[str, Any]]:
    """What a host starts that joins an elastic job which runs; see `tasks_of`.

    Args:
        task, port, run_id, token, restarts: of the job.
        place: the host's part.
        first_rank: of its workers; no process of the job has had it, or a higher one.
        local_first: the first of their local ranks, where the host has workers of the job already.
        node_rank: of the host.
        began_with: how many workers the job began with.
    """
    after = first_rank + place.workers
    tasks = []
    for local in range(place.workers):
        own = {TOKEN: token, ELASTIC: str(began_with), JOINS: "1"} | environment(
            first_rank + local,
            after,
            local_rank=local_first + local,
            local_world_size=local_first + place.workers,
            node_rank=node_rank,
            address=place.address,
            port=port,
            run_id=run_id,
            restarts=restarts,
        )
        defaults = {**_ELASTIC_DEFAULTS, **place.defaults}
        horovod = horovod_alias.variables(own, node_rank, node_rank + 1)
        rank = first_rank + local
        tasks.append({**task, "rank": rank, "env": own, "defaults": defaults, "horovod": horovod})
    return tasks
