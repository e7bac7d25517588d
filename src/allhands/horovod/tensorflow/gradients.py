"""Gradients reduced over the ranks: the reduction that tape and optimizer share, and the tape."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allhands.errors import UserError, kind_of
from allhands.horovod import engine, reduce_ops
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import ReduceOp
from allhands.horovod.tensorflow.bridge import as_written, check_device
from allhands.horovod.tensorflow.compression import Compression
from allhands.horovod.tensorflow.reductions import grouped_allreduce

# Gradients leave in pieces of about this size while earlier layers' are still computed: what
# DistributedDataParallel takes.
_BUCKET_BYTES = 25 * 2**20


class GradientReduction:
    """How a list of gradients is reduced over the ranks.

    Variables that were registered as local keep this rank's gradient, divided by the number of
    ranks if `scale_local_gradients`.

    Raises:
        UserError: options that exclude each other, or a device that is not a CPU.
    """

    def __init__(
        self,
        prefix: str,
        *,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = reduce_ops.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        check_device("device_dense", device_dense)
        check_device("device_sparse", device_sparse)
        self.op = reduce_ops.checked(op)
        if gradient_predivide_factor != 1.0 and self.op != reduce_ops.Average:
            raise UserError(
                f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average; it is "
                f"op={self.op}"
            )
        if num_groups:
            warnings.warn(
                "num_groups is Horovod's old name: write groups", DeprecationWarning, stacklevel=3
            )
            groups = num_groups if groups is None else groups
        self.prefix = prefix
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.predivide = float(gradient_predivide_factor)
        self.groups = _checked_groups(groups)
        self.process_set = process_set
        self.scale_local = scale_local_gradients
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """From now on the variable's gradient is not reduced."""
        self._local[_identity(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether the variable was registered as local."""
        return _identity(variable) in self._local

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients, in the same order; None stays None. A rank outside the process set
        gets its own back."""
        engine.current()  # says what to do before init()
        if not self.process_set.included():
            return list(gradients)
        results = [
            self._local_one(gradient)
            if gradient is not None and self.is_local(variable)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        wanted = [
            i for i, g in enumerate(gradients) if g is not None and not self.is_local(variables[i])
        ]
        ready = {i: _dense(gradients[i]) if self.sparse_as_dense else gradients[i] for i in wanted}
        place = {i: number for number, i in enumerate(wanted)}
        reduced = grouped_allreduce(
            [ready[i] for i in wanted],
            op=self.op,
            compression=self.compression,
            prescale_factor=1.0 / self.predivide,
            postscale_factor=self.predivide,
            process_set=self.process_set,
            ignore_name_scope=True,
            name=self.prefix,
            tensor_names=[f"gradient {i} of {_label(variables[i])}" for i in wanted],
            batches=[[place[i] for i in bucket] for bucket in self._buckets(ready, variables)],
        )
        for i, result in zip(wanted, reduced, strict=True):
            results[i] = result
        return results

    def _local_one(self, gradient: Any) -> Any:
        if not self.scale_local:
            return gradient
        size = self.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    def _buckets(self, gradients: dict[int, Any], variables: Sequence[Any]) -> list[list[int]]:
        """Which gradients travel together, those of the last layers first: backward passes compute
        them first."""
        order = sorted(gradients, reverse=True)
        if isinstance(self.groups, int):
            size = -(-len(order) // self.groups)
            return [order[i : i + size] for i in range(0, len(order), max(size, 1))]
        if self.groups is not None:
            group_of = {
                _identity(v): number for number, group in enumerate(self.groups) for v in group
            }
            together: dict[Any, list[int]] = {}
            for i in order:
                together.setdefault(group_of.get(_identity(variables[i]), f"alone {i}"), []).append(
                    i
                )
            return list(together.values())
        buckets: list[list[int]] = []
        room = 0
        for i in order:
            size = _bytes(gradients[i])
            if not buckets or size > room:
                buckets.append([])
                room = _BUCKET_BYTES
            buckets[-1].append(i)
            room -= size
        return buckets


def _checked_groups(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, list | tuple) and all(
        isinstance(group, list | tuple) for group in groups
    ):
        return [list(group) for group in groups]
    raise UserError(
        f"groups={groups!r}: write a number of groups from 1, or a list of lists of variables"
    )


def _identity(variable: Any) -> int:
    """Keras wraps each tf.Variable in a variable of its own; both mean the same one."""
    inner = getattr(variable, "_value", None)
    return id(inner if isinstance(inner, tf.Variable) else variable)


def _label(variable: Any) -> str:
    return str(
        getattr(variable, "path", None) or getattr(variable, "name", None) or kind_of(variable)
    )


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _bytes(gradient: Any) -> int:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    count = values.shape.num_elements()
    return _BUCKET_BYTES if count is None else int(count * values.dtype.size)


class _DistributedGradientTape(tf.GradientTape):
    """The methods that a distributed tape has over the tape that it was made of."""

    _reduction: GradientReduction

    def register_local_source(self, source: Any) -> None:
        """Leave this variable's gradient as it is on each rank, divided by the number of ranks."""
        self._reduction.register_local(source)

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """`tf.GradientTape.gradient`, reduced over the ranks; None where the target does not depend
        on a source."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = self._reduction(_flat(gradients), _flat(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    @as_written
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Pairs (source, gradient) of the sources registered as local, and of the others."""
        sources = _flat(sources)
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        return (
            [pair for pair in pairs if self._reduction.is_local(pair[0])],
            [pair for pair in pairs if not self._reduction.is_local(pair[0])],
        )


def _flat(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure))


@as_written
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = reduce_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient`` is reduced over the ranks. Wrap the tape after its ``with`` block,
    or in its header.

    ``jacobian`` and ``batch_jacobian`` stay those of this rank.

    Args:
        gradtape: a ``tf.GradientTape``.
        device_dense, device_sparse: see `allreduce`.
        compression: see `allreduce`.
        sparse_as_dense: turn ``tf.IndexedSlices`` into tensors before they are reduced.
        op: Average, Sum, or Adasum.
        gradient_predivide_factor: with Average, divide by this before the sum, by the number of
            ranks over this after it.
        num_groups: Horovod's old name for an integer `groups`.
        groups: which gradients travel together: a number of groups, or a list of lists of
            variables. None: about 25 MB each.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.

    Raises:
        UserError: not a tape, or options that exclude each other.
    """
    given = dict(locals())
    del given["gradtape"]
    if not isinstance(gradtape, tf.GradientTape):
        raise UserError(
            f"DistributedGradientTape takes a tf.GradientTape; this is {kind_of(gradtape)}"
        )
    cls = type(gradtape)
    tape: Any = object.__new__(type(cls.__name__, (_DistributedGradientTape, cls), {}))
    tape.__dict__.update(gradtape.__dict__)
    tape._reduction = GradientReduction("DistributedGradientTape", **given)
    return tape


@as_written
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = reduce_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` that leaves the gradients of `local_layers` (a Keras layer or a
    list of them) to each rank."""
    given = dict(locals())
    variables = variables_of(given.pop("local_layers"))
    tape = DistributedGradientTape(**given)
    for variable in variables:
        tape.register_local_source(variable)
    return tape


def variables_of(local_layers: Any) -> list[Any]:
    """The trainable variables of a Keras layer, or of a list of them; None has none."""
    if local_layers is None:
        layers = []
    elif isinstance(local_layers, tf.keras.layers.Layer):
        layers = [local_layers]
    else:
        layers = list(local_layers)
    for layer in layers:
        if not isinstance(layer, tf.keras.layers.Layer):
            raise UserError(f"local_layers takes Keras layers; this is {kind_of(layer)}")
        if not layer.built:
            raise UserError(
                f"local_layers: the layer {layer.name!r} has no variables yet; build the model "
                "first, by model.build(input_shape) or a layers.Input as its first layer"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
