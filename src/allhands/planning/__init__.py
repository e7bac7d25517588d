"""What a training would take on any number of GPUs: memory, bytes and time, before it is run."""

from allhands.planning.dry_step import meta_copies
from allhands.planning.fitting_changes import fitting_changes
from allhands.planning.step_memory import begin_step_memory

__all__ = ["begin_step_memory", "fitting_changes", "meta_copies"]
