"""The `mpi` backend of torch.distributed over mpi4py, for torch as its wheels are: built without
MPI.

`allhands.torch_hook` calls `new_group` and `create` when a group with this backend is made; nothing
else needs to.
"""

from __future__ import annotations

from allhands.comm.mpi.mpi_job import create, new_group
from allhands.comm.mpi.process_group import MPIGroup

__all__ = ["MPIGroup", "create", "new_group"]
