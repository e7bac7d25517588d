"""Elastic training with TensorFlow: ``hvd.elastic.run``, `TensorFlowState` and
`TensorFlowKerasState`.

See `allhands.horovod.elastic` for what a commit is and what happens after a worker is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from allhands.errors import UserError
from allhands.horovod.elastic import ObjectState, State, run
from allhands.horovod.tensorflow.conversions import to_array, to_torch
from allhands.horovod.tensorflow.variables import is_generator_state

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

_VARIABLES = " variables"  # no attribute can be called so


class TensorFlowState(ObjectState):
    """Variables, and whatever else a training counts: ``TensorFlowState(variables, epoch=0,
    batch=0)``.

    Args:
        variables: of TensorFlow or Keras; those of random generators are left to each rank.
        session: belongs to TensorFlow 1; leave it out.
        values: attributes of the state, plain values.

    Raises:
        UserError: no variables, or a session.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **values: Any
    ) -> None:
        if session is not None:
            raise UserError("session= belongs to TensorFlow 1: leave it out")
        self.variables = [
            variable for variable in variables or () if not is_generator_state(variable)
        ]
        if not self.variables:
            raise UserError(
                "a state needs variables: TensorFlow 2 has no global ones; write "
                "TensorFlowState(model.variables, …)"
            )
        super().__init__(**values)

    def contents(self) -> dict[str, Any]:
        """Copies of the values and of the variables."""
        kept = [
            to_torch(tf.convert_to_tensor(variable).numpy()).clone() for variable in self.variables
        ]
        return {**super().contents(), _VARIABLES: kept}

    def set_contents(self, contents: dict[str, Any]) -> None:
        """Assign the variables, and set the values."""
        kept = contents.get(_VARIABLES, ())
        if len(kept) != len(self.variables):
            raise UserError(
                f"the commit has {len(kept)} variables, and the state {len(self.variables)}: it is "
                "another script's"
            )
        for variable, value in zip(self.variables, kept, strict=True):
            variable.assign(to_array(value, tf.as_dtype(variable.dtype)))
        super().set_contents(contents)


class TensorFlowKerasState(TensorFlowState):
    """A Keras model and its optimizer, and whatever else a training counts:
    ``TensorFlowKerasState(model, epoch=0)``.

    Args:
        model: a built Keras model.
        optimizer: None: that which the model was compiled with.
        backend: belongs to TensorFlow 1; ignored, as by Horovod with TensorFlow 2.
        values: attributes of the state, plain values.

    Raises:
        UserError: the model is not built, or there is no optimizer.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any
    ) -> None:
        del backend
        if not model.built:
            raise UserError(
                "the model of a state has no weights yet: call model.build(input_shape) first"
            )
        chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if chosen is None:
            raise UserError(
                "a state needs the optimizer: pass optimizer=, or compile the model first"
            )
        if not chosen.built:
            chosen.build(model.trainable_variables)
        self.model, self.optimizer = model, chosen
        super().__init__([*model.weights, *chosen.variables], **values)
