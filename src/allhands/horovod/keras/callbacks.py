"""Horovod's older name for `allhands.horovod.tensorflow.keras.callbacks`."""

from __future__ import annotations

from allhands.horovod.tensorflow.keras.callbacks import *  # noqa: F403
