"""A Keras 3 optimizer whose gradients are reduced over the ranks before they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allhands.errors import UserError, kind_of
from allhands.horovod import reduce_ops
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import ReduceOp
from allhands.horovod.tensorflow.bridge import as_written
from allhands.horovod.tensorflow.compression import Compression
from allhands.horovod.tensorflow.gradients import GradientReduction
from allhands.horovod.tensorflow.keras.keras2 import CallableVariables


class _PassCounter:
    """Gradients of this rank that are added up until `every` backward passes are together."""

    def __init__(self, every: int, average: bool) -> None:
        self.every = every
        self.average = average
        self._count: Any = None
        self._sums: list[Any] = []

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        go: Callable[[list[Any]], None],
        hold: Callable[[], None],
    ) -> None:
        """Add gradients; on every `every`-th call `go` gets what was added up, on the others `hold`
        is called."""
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, dtype=tf.int32, trainable=False)
                self._sums = [
                    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables
                ]
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for i in present:
            self._sums[i].assign_add(tf.cast(gradients[i], self._sums[i].dtype))
        count = self._count.assign_add(1)

        def full() -> tf.Tensor:
            divisor = self.every if self.average else 1
            sums = [
                self._sums[i] / divisor if i in present else None for i in range(len(gradients))
            ]
            go(sums)
            for i in present:
                self._sums[i].assign(tf.zeros_like(self._sums[i]))
            return tf.constant(0)

        def waiting() -> tf.Tensor:
            hold()
            return tf.constant(0)

        tf.cond(count % self.every == 0, full, waiting)


class _Distributed:
    """The methods that a distributed optimizer has over the optimizer that it was made of."""

    _reduction: GradientReduction
    _passes: _PassCounter | None

    @property
    def variables(self) -> CallableVariables:
        return CallableVariables(super().variables)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable's gradient as it is on each rank, divided by the number of ranks."""
        self._reduction.register_local(variable)

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce the gradients over the ranks and update the variables with the result. Clipping
        acts on the result."""
        own: Any = self
        if trainable_variables is None:
            variables = list(getattr(own, "_trainable_variables", []))
        else:
            variables = list(trainable_variables)
            if not own.built:
                own.build(variables)
        if len(variables) != len(grads):
            raise UserError(
                f"apply: {len(grads)} gradients for {len(variables)} variables: pass one for each, "
                "or call build() first"
            )
        parent: Any = super()

        def update(gradients: Sequence[Any]) -> None:
            parent.apply(self._reduction(gradients, variables), variables)

        if self._passes is None:
            update(grads)
            return
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
            if not self._reduction.sparse_as_dense:
                raise UserError(
                    "backward_passes_per_step above 1 adds gradients up, which tf.IndexedSlices "
                    "are not: set sparse_as_dense=True"
                )
            grads = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads
            ]
        self._passes.add(grads, variables, update, lambda: own.iterations.assign_add(1))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = reduce_ops.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A Keras 3 optimizer that reduces gradients over the ranks before it applies them.

    The result has the class name and the settings of `optimizer`, and the state where it has one,
    so that a model saved with it loads without allhands. ``register_local_var(variable)`` leaves a
    variable's gradient to each rank.

    Args:
        optimizer: a ``tf.keras.optimizers.Optimizer``; it is not changed.
        name: prefix of the names that gradients have in messages. None: "Distributed" and the class
            of the optimizer.
        use_locking: accepted; it belonged to TensorFlow 1.
        device_dense, device_sparse: see `allhands.horovod.tensorflow.allreduce`.
        compression: see `allhands.horovod.tensorflow.allreduce`.
        sparse_as_dense: turn ``tf.IndexedSlices`` into tensors before they are reduced.
        backward_passes_per_step: add this many gradients up on each rank, then reduce and apply;
            ``iterations`` counts all.
        op: Average, Sum, or Adasum.
        gradient_predivide_factor: with Average, divide by this before the sum, by the number of
            ranks over this after it.
        average_aggregated_gradients: divide what was added up by `backward_passes_per_step`.
        num_groups: Horovod's old name for an integer `groups`.
        groups: which gradients travel together: a number of groups, or a list of lists of
            variables. None: about 25 MB each.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Raises:
        UserError: not a Keras 3 optimizer, or options that exclude each other.
    """
    del use_locking
    cls = type(optimizer)
    if isinstance(optimizer, _Distributed):
        raise UserError("this optimizer is distributed already: pass it as it is")
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise UserError(
            "DistributedOptimizer takes a tf.keras.optimizers.Optimizer of Keras 3; this is "
            f"{kind_of(optimizer)}"
        )
    if backward_passes_per_step < 1:
        raise UserError(f"backward_passes_per_step={backward_passes_per_step}: write 1 or more")
    config = optimizer.get_config()
    if isinstance(optimizer._learning_rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        # Classes of the user's own cannot be made from their configuration.
        config["learning_rate"] = optimizer._learning_rate
    kind = type(
        cls.__name__, (_Distributed, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    )
    made: Any = kind.from_config(config)  # type: ignore[attr-defined]
    made._reduction = GradientReduction(
        name or f"Distributed{cls.__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    several = backward_passes_per_step > 1
    made._passes = (
        _PassCounter(backward_passes_per_step, average_aggregated_gradients) if several else None
    )
    if optimizer.built:
        made.build(optimizer._trainable_variables)
        for ours, theirs in zip(made.variables, optimizer.variables, strict=True):
            ours.assign(theirs)
    return made
