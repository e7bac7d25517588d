"""Ranks that Open MPI's mpirun started. Under `srun --mpi=pmix` its variables are absent and
Slurm's are used instead.
"""

from __future__ import annotations

from allhands.errors import WorldError
from allhands.world.environments.base import Environment
from allhands.world.environments.mpi import mpi_meeting
from allhands.world.layout import Environ, Layout, Meeting, need_int, read_int


class OpenMPI(Environment):
    """OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE.

    OMPI_COMM_WORLD_NODE_RANK is left alone: despite its name it is a process's number on its host,
    not the host's.
    """

    name = "openmpi"

    def detected(self, environ: Environ) -> bool:
        return bool(environ.get("OMPI_COMM_WORLD_RANK", "").strip())

    def layout(self, environ: Environ) -> Layout:
        because = "OMPI_COMM_WORLD_RANK says that mpirun started this process"
        size = need_int(environ, "OMPI_COMM_WORLD_SIZE", because)
        check_world_size(environ, size, "OMPI_COMM_WORLD_SIZE")
        local_size = read_int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
        one_host = local_size == size
        return Layout(
            rank=need_int(environ, "OMPI_COMM_WORLD_RANK", because),
            world_size=size,
            local_rank=read_int(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=local_size,
            node_rank=0 if one_host else None,
            num_nodes=1 if one_host else None,
            environment=self.name,
        )

    def meeting(self, environ: Environ, layout: Layout) -> Meeting:
        # A name space is one mpirun's; version 4 reuses small numbers, so the daemon's address is
        # added to it.
        names = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI2")
        told = [environ.get(name, "-") for name in names]
        return mpi_meeting(
            environ, layout, "openmpi " + " ".join(told) if environ.get("PMIX_NAMESPACE") else None
        )


def check_world_size(environ: Environ, size: int, name: str) -> None:
    """A WORLD_SIZE in the environment must be MPI's own number."""
    told = read_int(environ, "WORLD_SIZE")
    if told is not None and told != size:
        raise WorldError(
            f"WORLD_SIZE={told}, but {name}={size}: start {told} processes with mpirun -n {told}, "
            "or unset WORLD_SIZE."
        )
