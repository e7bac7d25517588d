"""Ranks that Hydra started, the mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from allhands.world.environments.base import Environment
from allhands.world.environments.mpi import local_numbers, mpi_meeting
from allhands.world.environments.openmpi import check_world_size
from allhands.world.layout import Environ, Layout, Meeting, need_int


class Hydra(Environment):
    """PMI_RANK and PMI_SIZE; MPI_LOCALRANKID and MPI_LOCALNRANKS where the version sets them."""

    name = "mpich"

    def detected(self, environ: Environ) -> bool:
        return bool(environ.get("PMI_RANK", "").strip() and environ.get("PMI_SIZE", "").strip())

    def layout(self, environ: Environ) -> Layout:
        because = "PMI_RANK says that mpiexec started this process"
        size = need_int(environ, "PMI_SIZE", because)
        check_world_size(environ, size, "PMI_SIZE")
        local_rank, local_size = local_numbers(environ)
        one_host = local_size == size
        return Layout(
            rank=need_int(environ, "PMI_RANK", because),
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=0 if one_host else None,
            num_nodes=1 if one_host else None,
            environment=self.name,
        )

    def meeting(self, environ: Environ, layout: Layout) -> Meeting:
        return mpi_meeting(environ, layout, None)
