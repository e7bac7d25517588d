"""What a training would take on any number of GPUs: memory, bytes and time, before it is run."""

from allhands.planning.fitting_changes import fitting_changes

__all__ = ["fitting_changes"]
