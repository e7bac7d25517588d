"""The environments that can have started this process, asked in order; one file each."""

from __future__ import annotations

from allhands.world.environments.base import Environment
from allhands.world.environments.hydra import Hydra
from allhands.world.environments.openmpi import OpenMPI
from allhands.world.environments.slurm import Slurm
from allhands.world.environments.torchrun import Torchrun

ENVIRONMENTS: tuple[Environment, ...] = (Torchrun(), Slurm(), OpenMPI(), Hydra())

__all__ = ["ENVIRONMENTS", "Environment", "Hydra", "OpenMPI", "Slurm", "Torchrun"]
