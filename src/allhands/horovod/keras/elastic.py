"""Horovod's older name for `allhands.horovod.tensorflow.keras.elastic`."""

from __future__ import annotations

from allhands.horovod.tensorflow.keras.elastic import *  # noqa: F403
