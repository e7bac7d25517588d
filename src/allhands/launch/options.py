"""How a job is run, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from allhands.checks import check_choice, check_whole
from allhands.errors import UserError
from allhands.launch.recovery import CHOICES, RESTART, STOP
from allhands.launch.supervisor import HOST_TIMEOUT

# Seconds for which a host that was lost is waited for.
REJOIN_TIMEOUT = 30.0


@dataclass(frozen=True)
class Options:
    """How a job is run.

    Attributes:
        workers: how many in all; None: `slots` a host, else one for each GPU, or core, of each
            host.
        servers: how many parameter servers, one a host in turn.
        cwd: the working folder on other hosts.
        log_dir: folder for one `rank-N.log` each.
        prefix: start every line of output with the rank that wrote it, and its host.
        grace: seconds from SIGTERM to SIGKILL.
        heartbeat_timeout: seconds without a sign of life after which a worker has failed; 0 waits
            for ever.
        host_timeout: seconds without a word after which another host is lost.
        threads: CPU threads a worker; None: OMP_NUM_THREADS, or the cores divided among the
            workers.
        preload: import torch once a host, before the workers are forked.
        max_restarts: how many times the world is started again after a failure.
        server_restarts: how many times a server that died is started again while the workers run
            on, all servers together.
        on_worker_failure: "stop" ends, or starts again, all workers when one fails; "continue" lets
            the others go on without it; "restart" starts it alone again, up to `max_restarts`
            times. The last two need servers.
        elastic: when a worker is lost, the others go on in the same processes, and one that is
            started in its place, up to `max_restarts` times, joins them.
        spares: so many further workers, which take part only once another is missing.
        min_workers: with so many workers left a restart goes on without hosts that do not come
            back; None waits for all. Fewer of an elastic job save and end.
        max_workers: hosts may join the elastic job while it runs, up to so many workers; None: none
            may.
        rejoin_timeout: seconds for a lost host to come back.
        env_worker, env_server: variables of workers, or of servers, alone.
        env_joined: variables of the workers on hosts that join.
    """

    workers: int | None = None
    servers: int = 0
    cwd: str | None = None
    log_dir: str | os.PathLike[str] | None = None
    prefix: bool = True
    grace: float = 5.0
    heartbeat_timeout: float = 60.0
    host_timeout: float = HOST_TIMEOUT
    threads: int | None = None
    preload: bool = True
    max_restarts: int = 0
    server_restarts: int = 0
    on_worker_failure: str = STOP
    elastic: bool = False
    spares: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    rejoin_timeout: float = REJOIN_TIMEOUT
    env_worker: Mapping[str, str | None] = field(default_factory=dict)
    env_server: Mapping[str, str | None] = field(default_factory=dict)
    env_joined: Mapping[str, str | None] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UserError: naming the number and what it must be.
        """
        check_numbers(self.workers, self.grace, self.heartbeat_timeout, self.threads, self.servers)
        if self.max_restarts < 0:
            raise UserError(f"max_restarts={self.max_restarts!r}: it must be at least 0")
        if self.env_server and not self.servers:
            raise UserError(
                f"env_server (--env-server {next(iter(self.env_server))}) is for parameter "
                "servers, and servers=0; start some (-s 1), or write --env"
            )
        self._check_recovery()
        if self.host_timeout < 3:
            raise UserError(
                f"host_timeout={self.host_timeout!r}: it must be at least 3 seconds; hosts are "
                "asked once a second"
            )
        if self.min_workers is not None and self.min_workers < 1:
            raise UserError(f"min_workers={self.min_workers!r}: it must be at least 1")
        if self.min_workers is not None and not self.max_restarts and not self.elastic:
            raise UserError(
                "min_workers is about going on after a failure; set max_restarts (--max-restarts) "
                "as well"
            )
        if (
            self.min_workers is not None
            and self.workers is not None
            and self.min_workers > self.workers
        ):
            raise UserError(f"min_workers={self.min_workers} is more than workers={self.workers}")

    def _check_recovery(self) -> None:
        check_whole("spares", self.spares, 0)
        if self.spares and not self.elastic:
            raise UserError(
                f"spares={self.spares} is about workers that take the place of lost ones; set "
                "elastic (--elastic) as well"
            )
        if self.spares and self.workers is None:
            raise UserError(
                f"spares={self.spares} needs the number of workers beside them; set workers (-n 4)"
            )
        check_whole("max_workers", self.max_workers, otherwise="None")
        if self.max_workers is not None and not self.elastic:
            raise UserError(
                f"max_workers={self.max_workers} is about hosts that join a job while it runs; set "
                "elastic (--elastic) as well"
            )
        if self.max_workers is not None and self.max_workers < (self.workers or 1):
            raise UserError(
                f"max_workers={self.max_workers} is less than workers={self.workers}, with which "
                "the job begins"
            )
        if self.elastic and self.servers:
            raise UserError(
                "elastic makes a new world of the workers that are left, and workers with servers "
                "need none; write on_worker_failure='restart' (--on-worker-failure restart), or "
                "servers=0"
            )
        chosen = self.on_worker_failure
        if self.server_restarts < 0:
            raise UserError(f"server_restarts={self.server_restarts!r}: it must be at least 0")
        if self.server_restarts and not self.servers:
            raise UserError(
                f"server_restarts={self.server_restarts} is about parameter servers, and "
                "servers=0; start some (-s 1), or write "
                "max_restarts (--max-restarts), which starts all workers again"
            )
        check_choice("on_worker_failure", chosen, CHOICES)
        if chosen != STOP and not self.servers:
            raise UserError(
                f"on_worker_failure={chosen!r} needs parameter servers: workers that talk to one "
                "another in collectives cannot go on while one of them is missing. Start servers "
                "(-s 1) for workers that use allhands.kvstore, or write max_restarts "
                "(--max-restarts) alone, which starts all workers again"
            )
        if chosen == RESTART and not self.max_restarts:
            raise UserError(
                "on_worker_failure='restart' without max_restarts: set how many times "
                "(--max-restarts 3)"
            )


def check_numbers(
    workers: int | None,
    grace: float,
    heartbeat_timeout: float,
    threads: int | None,
    servers: int = 0,
) -> None:
    """Refuse what cannot be meant."""
    check_whole("workers", workers, otherwise="None")
    check_whole("servers", servers, 0)
    if grace < 0:
        raise UserError(f"grace={grace!r}: it must be 0 or more seconds")
    if heartbeat_timeout < 0:
        raise UserError(
            f"heartbeat_timeout={heartbeat_timeout!r}: it must be 0 (never) or more seconds"
        )
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads!r}: it must be at least 1")
