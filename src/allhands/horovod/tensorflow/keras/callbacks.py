"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from allhands.errors import UserError
from allhands.horovod import basics
from allhands.horovod.tensorflow.bridge import check_device
from allhands.horovod.tensorflow.reductions import grouped_allreduce
from allhands.horovod.tensorflow.variables import broadcast_variables


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's state of global rank `root_rank`, once.

    This happens before the first batch where the model is built by then, else after it, as in
    Horovod.

    Args:
        root_rank: whose values are taken.
        device: accepted when empty or a CPU.
        local_variables: variables to leave alone.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        check_device("device", device)
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = [id(variable) for variable in local_variables or ()]

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable alone."""
        self._local.append(id(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built."""
        if self.model.built:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if it was not done before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = [*self.model.weights, *self.model.optimizer.variables]
        broadcast_variables([v for v in variables if id(v) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(tf.keras.callbacks.Callback):
    """Replace every value of an epoch's logs by its mean over the ranks, each rank counted once.

    Put it before callbacks that read the logs (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint).
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        check_device("device", device)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the logs in place."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        values = [tf.constant(float(logs[name]), tf.float64) for name in names]
        means = grouped_allreduce(values, name="MetricAverageCallback", tensor_names=names)
        for name, mean in zip(names, means, strict=True):
            logs[name] = float(mean)


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` from `start_epoch` until
    `end_epoch`.

    Args:
        initial_lr: what the multiplier multiplies.
        multiplier: a function of the epoch (a fraction unless `staircase`), or a number b for ``b
            ** (epoch - start_epoch)``.
        start_epoch: the first epoch that this schedule is for.
        end_epoch: the first that it is not for any more; None: all.
        staircase: set it at the start of an epoch only, not at every batch.
        momentum_correction: when the rate changes, scale the velocities of SGD or RMSprop by new
            rate over old, so that past gradients count as if they had been taken at the new rate
            (Goyal et al., 2017, see the warm-up).
        steps_per_epoch: batches in an epoch; None: what ``fit`` knows.

    Raises:
        UserError: no `initial_lr`; an optimizer whose learning rate is a schedule of its own; an
            epoch of unknown length.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UserError(
                f"{type(self).__name__} needs initial_lr: set it to the optimizer's learning rate"
            )
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the optimizer and the length of an epoch."""
        if isinstance(
            self.model.optimizer._learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule
        ):
            raise UserError(
                f"{type(self).__name__}: the optimizer's learning_rate is a schedule, which "
                "nothing else can set: give the optimizer a number"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UserError(
                    f"{type(self).__name__}: the number of batches in an epoch is not known: set "
                    "steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, when it is time."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / float(self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the learning rate in the logs, as "lr"."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _set(self, epoch: float) -> None:
        before, now = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer = self.model.optimizer
        optimizer.learning_rate = now
        velocities = (
            getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
        )
        # Adam's momentums are means of gradients, without a learning rate in them; it has no
        # attribute "momentum".
        if (
            self.momentum_correction
            and getattr(optimizer, "momentum", None)
            and before not in (0.0, now)
        ):
            for velocity in velocities:
                velocity.assign(velocity * (now / before))

    def _rate(self) -> float:
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate evenly from ``initial_lr / size`` to `initial_lr` over the first
    epochs.

    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017), section 2.2.

    Args:
        initial_lr: the rate after the warm-up: that of one worker times the number of ranks.
        warmup_epochs: how long it takes.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1: say on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends on a round number.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            return (epoch * (basics.size() - 1) / warmup_epochs + 1) / basics.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the learning rate, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and basics.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


def BestModelCheckpoint(*args: Any, **kwargs: Any) -> Any:
    """Horovod's callback for estimators of Spark.

    Raises:
        UserError: always; it says what to write.
    """
    raise UserError(
        "BestModelCheckpoint belonged to horovod.spark and has no path: write "
        "tf.keras.callbacks.ModelCheckpoint(path, save_best_only=True) on rank 0"
    )
