"""Variables and Python objects, made the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from allhands.errors import UserError, kind_of
from allhands.horovod import engine
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.tensorflow.bridge import as_written, check_device
from allhands.horovod.tensorflow.collectives import broadcast_all


@as_written
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables with those of global rank `root_rank`, in one exchange.

    The states of Keras's random generators (of a Dropout layer, for example) are left alone: Keras
    3 lists them among ``model.variables``, and with equal ones all ranks would drop the same units.

    Args:
        variables: of TensorFlow or Keras, in the same order on all ranks.
        root_rank: whose values are taken.
        process_set: the ranks that take part.
        inplace: accepted; here variables are always overwritten where they are.

    Raises:
        UserError: something is no variable.
        HorovodInternalError: the lists differ between ranks; the message names the first
            difference.
    """
    kept = [variable for variable in variables if not is_generator_state(variable)]
    for variable in kept:
        if not hasattr(variable, "assign"):
            raise UserError(
                f"broadcast_variables takes variables; one of them is {kind_of(variable)}"
            )
    if not kept:
        return
    received = broadcast_all(
        [tf.convert_to_tensor(variable) for variable in kept],
        root_rank,
        kind="broadcast_variables",
        tensor_names=[f"variable {i} of {getattr(v, 'path', v.name)}" for i, v in enumerate(kept)],
        process_set=process_set,
    )
    for variable, value in zip(kept, received, strict=True):
        variable.assign(value)


@as_written
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with those of `root_rank`, those of random generators included, and
    return their new values."""
    variables = list(variables)
    received = broadcast_all(
        [tf.convert_to_tensor(v) for v in variables],
        root_rank,
        name=name,
        kind="broadcast_",
        process_set=process_set,
    )
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
    return received


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all ranks the global variables of rank `root_rank`, for a session of
    TensorFlow 1.

    Raises:
        UserError: TensorFlow 2 runs, which has no global variables; it says what to write.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        raise UserError(
            "there are no global variables in TensorFlow 2: write "
            "hvd.broadcast_variables(model.variables, root_rank=0) "
            "and the same with optimizer.variables"
        )
    variables = tf.compat.v1.global_variables()
    if not variables:
        raise UserError("broadcast_global_variables: the graph has no variables; call it later")
    received = broadcast_all(
        [tf.convert_to_tensor(variable) for variable in variables],
        root_rank,
        kind="broadcast_global_variables",
        tensor_names=[variable.name for variable in variables],
    )
    return tf.group(
        *(variable.assign(value) for variable, value in zip(variables, received, strict=True))
    )


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Give all ranks the global variables of rank `root_rank`, when a monitored session of
    TensorFlow 1 begins.

    Args:
        root_rank: whose values are taken.
        device: accepted when empty or a CPU.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        check_device("device", device)
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Build the operation, while the graph can be changed."""
        self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self.bcast_op)


def is_generator_state(variable: Any) -> bool:
    """Whether a variable is the state of one of Keras's random generators."""
    return isinstance(variable, tf.keras.Variable) and variable.name == "seed_generator_state"


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of global rank `root_rank`, on every rank. It is not pickled: see
    `allhands.horovod.torch.broadcast_object`."""
    _refuse_session(session)
    return engine.current().broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A function that calls `broadcast_object` with these arguments."""
    _refuse_session(session)
    return lambda obj: broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """All ranks' objects, in the order of the ranks."""
    _refuse_session(session)
    return list(engine.current().allgather_object(obj, name=name, process_set=process_set))


def _refuse_session(session: Any) -> None:
    if session is not None:
        raise UserError("session= belongs to TensorFlow 1: leave it out")
