"""Words of Keras 2 that scripts for Horovod use, each with a warning.

`import horovod.tensorflow` under ``allhands launch --horovod`` gives them to Keras 3;
``import allhands.horovod.tensorflow`` changes nothing in Keras.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allhands.errors import UserError

# What they are now, and the arguments that scripts give without their names.
_GENERATORS = {
    "fit_generator": ("fit", ("steps_per_epoch", "epochs")),
    "evaluate_generator": ("evaluate", ("steps",)),
    "predict_generator": ("predict", ("steps",)),
}
# Keras 3 takes them in `keras.utils.PyDataset`; they make no difference to what is computed.
_LOADING = ("workers", "use_multiprocessing", "max_queue_size")
_provided = False
_said: set[str] = set()


def provide() -> None:
    """Give Keras 3 the words, in this process."""
    global _provided
    if _provided:
        return
    _provided = True
    _optimizers()
    _models()
    _metrics()


class CallableVariables(list[Any]):
    """Keras 3 has ``optimizer.variables``; scripts written for Keras 2 call it.

    Args:
        variables: the list.
        warn: whether a call gives a warning.
    """

    def __init__(self, variables: Any, warn: bool = False) -> None:
        super().__init__(variables)
        self._warn = warn

    def __call__(self) -> CallableVariables:
        if self._warn:
            _say("optimizer.variables()", "optimizer.variables")
        return self


def _say(old: str, new: str) -> None:
    """Once for each word; `stacklevel` leads out of here and of the function that calls this."""
    if old in _said:
        return
    _said.add(old)
    warnings.warn(
        f"{old} is Keras 2's, and allhands launch --horovod translates it: write {new}",
        FutureWarning,
        stacklevel=3,
    )


def _owner(cls: Any, name: str) -> Any:
    return next(each for each in cls.__mro__ if name in vars(each))


def _with_subclasses(cls: Any) -> list[Any]:
    return [cls, *(found for each in cls.__subclasses__() for found in _with_subclasses(each))]


def _optimizers() -> None:
    optimizer = tf.keras.optimizers.Optimizer
    for cls in _with_subclasses(_owner(optimizer, "variables")):
        found = vars(cls).get("variables")
        if isinstance(found, property) and found.fget is not None:
            cls.variables = property(functools.partial(_callable, found.fget))
    base = _owner(optimizer, "learning_rate")
    base.__init__ = _with_old_arguments(base.__init__)
    base.lr = property(_get_rate, _set_rate)
    backend = tf.keras.backend
    backend.set_value = _set_value(backend.set_value)


def _callable(read: Callable[[Any], list[Any]], optimizer: Any) -> CallableVariables:
    return CallableVariables(read(optimizer), warn=True)


def _with_old_arguments(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def run(self: Any, learning_rate: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            learning_rate = kwargs.pop("lr")
            _say(f"{type(self).__name__}(lr=...)", "learning_rate=")
        decay = kwargs.pop("decay", None)
        if decay:
            schedules = tf.keras.optimizers.schedules
            if isinstance(learning_rate, schedules.LearningRateSchedule):
                raise UserError(
                    f"{type(self).__name__}(decay={decay}) with a learning_rate that is a schedule "
                    "already: leave decay out"
                )
            learning_rate = schedules.InverseTimeDecay(learning_rate, 1, decay)
            text = f"learning_rate=InverseTimeDecay(learning_rate, 1, {decay})"
            _say(f"{type(self).__name__}(decay=...)", text)
        init(self, learning_rate, *args, **kwargs)

    return run


def _get_rate(optimizer: Any) -> Any:
    _say("optimizer.lr", "optimizer.learning_rate")
    return optimizer.learning_rate


def _set_rate(optimizer: Any, rate: Any) -> None:
    _say("optimizer.lr", "optimizer.learning_rate")
    optimizer.learning_rate = rate


def _set_value(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Keras 3 still lists ``backend.set_value``, which fails for its own variables."""

    @functools.wraps(original)
    def run(x: Any, value: Any) -> None:
        if not isinstance(x, tf.keras.Variable):
            return original(x, value)
        _say("backend.set_value(x, value)", "x.assign(value)")
        x.assign(value)
        return None

    return run


def _models() -> None:
    model = tf.keras.Model
    _leave_out(model, "compile", ["experimental_run_tf_function"])
    for old, (new, names) in _GENERATORS.items():
        _leave_out(model, new, _LOADING)
        setattr(model, old, _of_a_generator(old, new, names))
    model.reset_states = _reset_layers


def _leave_out(model: Any, name: str, arguments: Sequence[str]) -> None:
    """Let a method take arguments that Keras 3 has no use for."""
    owner = _owner(model, name)
    method = vars(owner)[name]

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in arguments:
            if argument in kwargs:
                kwargs.pop(argument)
                _say(f"{name}({argument}=...)", f"{name} without it")
        return method(self, *args, **kwargs)

    setattr(owner, name, run)


def _of_a_generator(old: str, new: str, names: Sequence[str]) -> Callable[..., Any]:
    def run(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise UserError(f"model.{old}: give the arguments after {names[-1]} by their names")
        _say(f"model.{old}", f"model.{new}")
        return getattr(self, new)(generator, **dict(zip(names, args, strict=False)), **kwargs)

    run.__name__ = old
    return run


def _reset_layers(model: Any) -> None:
    """Keras 2's ``model.reset_states``: of all layers that keep a state between batches."""
    _say("model.reset_states", "layer.reset_state() for each layer that is stateful")
    for layer in model.layers:
        if isinstance(layer, tf.keras.Model):
            _reset_layers(layer)
        elif getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()


def _metrics() -> None:
    def reset_states(metric: Any) -> None:
        _say("metric.reset_states", "metric.reset_state")
        metric.reset_state()

    tf.keras.metrics.Metric.reset_states = reset_states
