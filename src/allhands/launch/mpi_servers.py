"""Parameter servers beside the ranks of an MPI launcher: on this host, which the ranks reach."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from types import TracebackType

from allhands.errors import UserError
from allhands.launch import plan, processes
from allhands.launch.store_host import StoreHost
from allhands.world.interface import reachable_addresses

# Seconds for servers to end once the ranks have.
_GRACE = 5.0


class MpiServers:
    """The store of a job and its parameter servers, as a context; nothing where there are none.

    Args:
        count: how many servers.
        world_size: how many ranks.
        elsewhere: ranks run on other hosts.
        variables: of the servers.

    Raises:
        UserError: other hosts do not reach this one.
    """

    def __init__(
        self, count: int, world_size: int, elsewhere: bool, variables: Mapping[str, str]
    ) -> None:
        self.count, self._variables = count, dict(variables)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: StoreHost | None = None
        #: For the ranks.
        self.variables: dict[str, str] = {}
        if not count:
            return
        address = "127.0.0.1"
        if elsewhere:
            found = reachable_addresses()
            if not found:
                raise UserError(
                    "--servers with --launcher mpi: this host has no address that other hosts "
                    "reach; start servers with --launcher ssh"
                )
            address = found[0]
        self._store = StoreHost("" if elsewhere else address)
        told = plan.environment(
            0,
            world_size,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            address=address,
            port=self._store.port,
            run_id=uuid.uuid4().hex,
            servers=count,
        )
        self._shared = {
            **{name: told[name] for name in told if "RANK" not in name},
            plan.SERVER_RESTART: "0",
            plan.WORKER_RESTART: "0",
            plan.ON_WORKER_FAILURE: "stop",
        }
        own = ("LOCAL_WORLD_SIZE", plan.MARK)  # which MPI tells, or the local launcher has
        self.variables = {name: value for name, value in self._shared.items() if name not in own}

    def __enter__(self) -> MpiServers:
        if self._store is None:
            return self
        import torch.distributed  # noqa: F401  in the store's process too

        self._store.start(())
        parent = os.getpid()
        for number in range(self.count):
            env = {**os.environ, **self._variables, **self._shared, "ALLHANDS_SERVER": str(number)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", plan.SERVER],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._store is not None:
            self._store.stop()

    def failed(self) -> str:
        """Which server has ended, in words; "" where all run."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                return f"server {number} ended with exit code {process.returncode}"
        return ""
