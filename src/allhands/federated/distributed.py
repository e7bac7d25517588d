"""COALA's ``from coala.distributed import slurm``."""

from __future__ import annotations

from allhands.world import slurm

__all__ = ["slurm"]
