"""Horovod's older name for `allhands.horovod.tensorflow.keras`."""

from __future__ import annotations

from allhands.horovod.tensorflow.keras import *  # noqa: F403
from allhands.horovod.tensorflow.keras import __all__ as __all__
