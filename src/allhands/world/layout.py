"""Who a process is among the processes, and where they meet: the two facts that an environment
tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allhands.errors import UserError, WorldError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """The place of this process among all processes, as far as its environment tells.

    `None` means "not told": such numbers are worked out when the processes meet, from the hosts
    that they run on. Ranks count from 0.

    Raises `WorldError` when two of the numbers contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    environment: str = "explicit"

    def __post_init__(self) -> None:
        pairs = (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("node_rank", self.node_rank, "num_nodes", self.num_nodes),
        )
        for name, index, size_name, size in pairs:
            if size is not None and size < 1:
                raise WorldError(
                    f"{self.environment}: {size_name}={size}, but it must be at least 1."
                )
            if index is not None and (index < 0 or (size is not None and index >= size)):
                if size is None:
                    last = "at least 0"
                else:
                    last = f"between 0 and {size - 1} because {size_name}={size}"
                raise WorldError(f"{self.environment}: {name}={index}, but it must be {last}.")
        if self.local_world_size is not None and self.local_world_size > self.world_size:
            raise WorldError(
                f"{self.environment}: local_world_size={self.local_world_size} is more than "
                f"world_size={self.world_size}; one host cannot hold more processes than there are."
            )
        if self.num_nodes is not None and self.num_nodes > self.world_size:
            raise WorldError(
                f"{self.environment}: {self.num_nodes} hosts for world_size={self.world_size}; a "
                "host of the world holds at least one process."
            )

    @property
    def one_host(self) -> bool | None:
        """Whether all processes run on one host; None when the environment does not tell."""
        if self.num_nodes is not None:
            return self.num_nodes == 1
        if self.world_size in {1, self.local_world_size}:
            return True
        return None if self.local_world_size is None else False


@dataclass(frozen=True)
class Meeting:
    """Where the processes meet.

    With `port`, rank 0 (or, with `agent_store`, the program that started the processes) listens on
    `host:port`. Without, the port is agreed through rank 0 on one of `hosts`, by the secret-free
    name of the job, `job_key` (see `allhands.world.discovery`). `path` is the shared file of
    `file://`.
    """

    hosts: tuple[str, ...] = ()
    port: int | None = None
    job_key: str | None = None
    path: str | None = None
    agent_store: bool = False
    attempt: int = 0
    mpi_broadcast: bool = False

    def __str__(self) -> str:
        if self.path is not None:
            return f"file://{self.path}"
        host = self.hosts[0] if self.hosts else "localhost"
        return f"{host}:{self.port or '(port agreed through rank 0)'}"


def read_int(environ: Environ, name: str) -> int | None:
    """The whole number in variable `name`, None when it is unset or empty; `UserError` names a
    variable that is none.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name}={text!r} is not a whole number; set {name} to one or unset it."
        ) from None


def need_int(environ: Environ, name: str, because: str) -> int:
    """Like `read_int`, but an absent variable is a `UserError` that says why it is needed."""
    value = read_int(environ, name)
    if value is None:
        raise UserError(f"{name} is not set, but {because}; set {name} to a whole number.")
    return value


def read_port(environ: Environ, name: str = "MASTER_PORT") -> int | None:
    """The port in variable `name`; `UserError` when it is not between 1 and 65535."""
    port = read_int(environ, name)
    if port is not None and not 0 < port < 2**16:
        raise UserError(f"{name}={port}, but a port must be between 1 and 65535.")
    return port


def given_meeting(environ: Environ) -> Meeting | None:
    """The meeting point that MASTER_ADDR and MASTER_PORT name, if both are set. They are believed
    in any environment.
    """
    host, port = environ.get("MASTER_ADDR", "").strip(), read_port(environ)
    return Meeting((host,), port) if host and port is not None else None
