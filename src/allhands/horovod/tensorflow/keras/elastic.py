"""Elastic training with Keras: the state, ``run``, and callbacks that keep the state up to date."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allhands.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """Horovod's other name for `TensorFlowKerasState`."""


class CommitStateCallback(tf.keras.callbacks.Callback):
    """Commit the state every `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: TensorFlowKerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count anew, on all ranks alike."""
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, when it is time."""
        self._since += 1
        if self._since == self.batches_per_commit:
            self.state.commit()
            self._since = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(tf.keras.callbacks.Callback):
    """Keep ``state.batch`` at the number of the last batch, and at 0 between epochs.

    Keras 3 does not let a callback shorten an epoch: after a restart, give ``fit`` as many steps as
    are left, or accept that the epoch begins again.
    """

    def __init__(self, state: TensorFlowKerasState) -> None:
        super().__init__()
        self.state: Any = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note that none is under way."""
        self.state.batch = 0


class UpdateEpochStateCallback(tf.keras.callbacks.Callback):
    """Keep ``state.epoch`` at the number of epochs that are over, those before a restart
    included."""

    def __init__(self, state: TensorFlowKerasState) -> None:
        super().__init__()
        self.state: Any = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Remember the epochs before this ``fit``."""
        self._before = int(self.state.epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.state.epoch = self._before + epoch + 1
