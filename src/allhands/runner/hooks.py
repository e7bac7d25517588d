"""Methods that look as if the training called them, and are none that it calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from allhands.errors import UserError, nearest
from allhands.runner.callbacks import Callback, is_overridden

# What other libraries (Catalyst, Lightning, Keras, transformers) call their hooks, and ours in
# their place: the first of these that exists. The empty ones have none.
_FOREIGN_HOOKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("on_batch_end", "on_train_batch_end", "on_training_step_end", "on_optimizer_step"),
        ("on_step_end",),
    ),
    **dict.fromkeys(
        (
            "on_batch_start",
            "on_batch_begin",
            "on_train_batch_start",
            "on_train_batch_begin",
            "on_step_start",
            "on_step_begin",
            "on_substep_end",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_pre_optimizer_step",
            "on_exception",
        ),
        (),
    ),
    **dict.fromkeys(
        ("on_stage_start", "on_experiment_start", "on_fit_start", "on_train_begin", "on_init_end"),
        ("on_train_start",),
    ),
    **dict.fromkeys(("on_stage_end", "on_experiment_end", "on_fit_end"), ("on_train_end",)),
    **dict.fromkeys(
        ("on_epoch_begin", "on_train_epoch_start", "on_loader_start"), ("on_epoch_start",)
    ),
    **dict.fromkeys(("on_train_epoch_end", "on_loader_end", "on_log"), ("on_epoch_end",)),
    **dict.fromkeys(
        (
            "on_validation_start",
            "on_validation_epoch_start",
            "on_test_begin",
            "on_eval_start",
            "on_evaluate_begin",
        ),
        ("on_evaluate_start", "on_evaluation_start", "on_epoch_start"),
    ),
    **dict.fromkeys(
        (
            "on_validation_end",
            "on_validation_epoch_end",
            "on_test_end",
            "on_eval_end",
            "on_evaluate",
        ),
        ("on_evaluate_end", "on_evaluation_end", "on_epoch_end"),
    ),
    "on_save_checkpoint": ("state_dict",),
    "on_save": ("state_dict",),
    "on_load_checkpoint": ("load_state_dict",),
}
_HOOK_LIKE = re.compile(r"(on|before|after)(_|[A-Z])")
_ALIKE = 0.84  # "epoch_end" is like "on_epoch_end"
# Parameters with which Keras calls its hooks, where ours are given the training.
_NOT_TRAINING = ("epoch", "batch", "logs", "step")

_FOREIGN_RUNNER = {
    **dict.fromkeys(("compute_loss", "get_criterion"), "train(criterion=…)"),
    **dict.fromkeys(("get_loaders", "train_dataloader", "val_dataloader"), "train(loaders=…)"),
    **dict.fromkeys(("get_optimizer", "configure_optimizers"), "train(optimizer=…, scheduler=…)"),
    **dict.fromkeys(("get_scheduler", "configure_scheduler"), "train(scheduler=…)"),
    **dict.fromkeys(("get_callbacks", "configure_callbacks"), "train(callbacks=[…])"),
    "get_model": "train(model=…)",
    "get_datasets": "train(datasets={…})",
}
_TRAIN_STEP, _VALID_STEP = "train_step(self, loop, batch)", "valid_step(self, loop, batch)"
_FOREIGN_SUPERVISED = _FOREIGN_RUNNER | dict.fromkeys(
    (
        "_handle_batch",
        "predict_batch",
        "forward",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
    ),
    "handle_batch(self, model, batch)",
)
_FOREIGN_OWN = (
    _FOREIGN_RUNNER
    | dict.fromkeys(("_handle_batch", "handle_batch", "forward", "training_step"), _TRAIN_STEP)
    | dict.fromkeys(("validation_step", "test_step"), _VALID_STEP)
)


def hooks(base: type[Callback] = Callback) -> list[str]:
    """The names of the hooks that a `Callback`, or a kind of them, has."""
    names = (name for cls in reversed(base.__mro__) for name in vars(cls))
    return list(dict.fromkeys(name for name in names if name.startswith("on_")))


def _kind_of_ours(callback: Callback) -> type[Callback]:
    """The nearest class of a callback that is ours and has hooks."""
    return next(
        cls
        for cls in type(callback).__mro__
        if issubclass(cls, Callback) and cls.__module__.startswith("allhands.")
    )


def check_callback(callback: Callback) -> None:
    """Raise `UserError` for a method that looks like a hook and is none, and for a hook that cannot
    be called as one."""
    base = _kind_of_ours(callback)
    known, kind = hooks(base), type(callback).__name__
    for name, _ in _own_methods(callback, Callback):
        if hasattr(base, name):
            continue
        meant = _FOREIGN_HOOKS.get(name)
        if (
            meant is None
            and not _HOOK_LIKE.match(name)
            and nearest(name, [*known, "state_dict", "load_state_dict"], _ALIKE) is None
        ):
            continue
        there = [hook for hook in meant or () if hasattr(base, hook)]
        if meant is None:
            there = [
                hook for hook in [nearest(name, [*known, "state_dict", "load_state_dict"])] if hook
            ]
        if there:
            what = f"write {_written(there[0], base)}"
        else:
            what = f"there is no hook at that point; the hooks are {', '.join(known)}"
        raise UserError(
            f"{kind}.{name} looks like a hook, and is none that a training calls: {what}. A method "
            "of your own that only looks "
            f"like one is called by the class itself, or has another name, such as _{name}"
        )
    for name in known:
        if is_overridden(callback, name, base):
            written = f"def {_written(name, base)}"
            _check_call(getattr(callback, name), f"{kind}.{name}", written, (None,))
    _check_call(callback.state_dict, f"{kind}.state_dict", "def state_dict(self)", ())
    _check_call(
        callback.load_state_dict,
        f"{kind}.load_state_dict",
        "def load_state_dict(self, state)",
        ({},),
    )


def check_runner(
    runner: Any, base: type, own: Mapping[str, tuple[str, tuple[Any, ...]]] | None = None
) -> None:
    """Raise `UserError` for a method of a subclass of `SupervisedRunner` (`base`) that looks like
    one to override and is none; `own` are methods of the base's own, see `check_methods`."""
    kind = type(runner).__name__
    for name, _ in _own_methods(runner, base):
        if name in ("setup", "train_step", "valid_step"):
            raise UserError(
                f"{kind}.{name} is never called by a SupervisedRunner; write handle_batch(self, "
                f"model, batch), or class {kind}(allhands.Runner) with {_TRAIN_STEP}"
            )
    calls = {
        "handle_batch": ("self, model, batch", (None, None)),
        "target_of": ("self, batch", (None,)),
        "rows_of": ("self, batch", (None,)),
    }
    check_methods(runner, base, calls | dict(own or {}), _FOREIGN_SUPERVISED)


def check_own_runner(runner: Any, base: type) -> None:
    """Raise `UserError` for a runner of one's own without a step, or with a method that looks like
    one to override and is none; `base` is `Runner`."""
    kind = type(runner).__name__
    calls = {
        "setup": ("self, loop", (None,)),
        **dict.fromkeys(("train_step", "valid_step"), ("self, loop, batch", (None, None))),
    }
    check_methods(runner, base, calls, _FOREIGN_OWN)
    if type(runner).train_step is base.train_step:  # type: ignore[attr-defined]
        raise UserError(
            f"{kind} has no step of its own; write class Own(allhands.Runner) with {_TRAIN_STEP}, "
            "or use SupervisedRunner"
        )


def check_methods(
    runner: Any,
    base: type,
    calls: Mapping[str, tuple[str, tuple[Any, ...]]],
    foreign: Mapping[str, str],
) -> None:
    """Raise `UserError` for a method of a subclass of `base` that looks like one to override and is
    none, or cannot be called.

    Args:
        calls: what is called: its parameters, and what it is called with.
        foreign: what to write for the names that other libraries have.
    """
    kind = type(runner).__name__
    for name, _ in _own_methods(runner, base):
        if hasattr(base, name):
            continue
        if name in foreign:
            raise UserError(f"{kind}.{name} is never called; write {foreign[name]}")
        if _HOOK_LIKE.match(name):
            near = [
                hook
                for hook in (*_FOREIGN_HOOKS.get(name, ()), nearest(name, hooks()))
                if hook and hasattr(Callback, hook)
            ]
            hook = f", as {_written(near[0])}" if near else ""
            raise UserError(
                f"{kind}.{name} is never called: hooks belong to an allhands.Callback{hook}; write "
                "callbacks=[…]"
            )
        near_name = nearest(name, list(calls), _ALIKE)
        if near_name is not None:
            raise UserError(f"{kind}.{name} is never called; did you mean {near_name}?")
    for name, (parameters, arguments) in calls.items():
        method, written = getattr(runner, name), f"def {name}({parameters})"
        _check_call(method, f"{kind}.{name}", written, arguments)


def _written(name: str, base: type[Callback] = Callback) -> str:
    return f"{name}({', '.join(inspect.signature(getattr(base, name)).parameters)})"


def _own_methods(value: Any, base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of an object and of its classes below `base`, by name, but those that the
    classes themselves use."""
    classes = [
        cls
        for cls in type(value).__mro__
        if issubclass(cls, base) and not cls.__module__.startswith("allhands.")
    ]
    # A class that is mixed in (a Keras callback that is one of ours too) is looked at with them.
    classes += [
        cls
        for cls in type(value).__mro__
        if not issubclass(cls, base)
        and cls not in (*base.__mro__, object)
        and not cls.__module__.startswith("allhands.")
    ]
    used: set[str] = set()
    found: dict[str, Callable[..., Any]] = {}
    for names in (vars(value), *map(vars, classes)):
        for name, member in _functions(names):
            found.setdefault(name, member)
            used |= _names_in(member.__code__)
    yield from ((name, member) for name, member in found.items() if name not in used)


def _functions(names: Mapping[str, Any]) -> Iterator[tuple[str, FunctionType]]:
    for name, member in names.items():
        if callable(getattr(member, "__func__", member)):
            function = inspect.unwrap(getattr(member, "__func__", member))
        else:
            function = None
        if isinstance(function, FunctionType) and not name.startswith("__"):
            yield name, function


def _names_in(code: CodeType) -> set[str]:
    """The attributes and names that a function uses, those of the functions in it too."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _check_call(method: Any, name: str, written: str, arguments: tuple[Any, ...]) -> None:
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        what = "a coroutine" if inspect.iscoroutinefunction(method) else "a generator"
        raise UserError(
            f"{name} is {what}, of which a call runs nothing; write {written} without async or "
            "yield"
        )
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # a function that is not Python's own
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{name}{signature} cannot be called as a training calls it ({error}); write {written}"
        ) from None
    first = next(iter(signature.parameters), "")
    for given in ("training", "runner"):
        if arguments == (None,) and f"self, {given})" in written and first in _NOT_TRAINING:
            raise UserError(
                f"{name}{signature} would get the {given} as {first!r}; write {written}"
            )
