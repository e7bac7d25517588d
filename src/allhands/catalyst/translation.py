"""What a callback of Catalyst's means to `SupervisedRunner.train`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allhands.errors import UserError, kind_of
from allhands.runner import Callback


class ArgumentCallback:
    """A callback of Catalyst's that is an argument of `train` here.

    Attributes:
        settings: arguments of `train`, by name.
        metrics: what is measured, by name.
        keys: of the runner that it needs to be another's: ``{"output_key": "logits"}``.
        instead: callbacks of ours that do the rest.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        keys: Mapping[str, Any] | None = None,
        instead: Sequence[Callback] = (),
    ) -> None:
        self.settings, self.metrics = _given(settings), _given(metrics)
        self.keys, self.instead = _given(keys), list(instead)


def _given(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


def translate(
    runner: Any, callbacks: Iterable[Any], given: Mapping[str, Any], by_batch: bool = False
) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of `train` that callbacks stand for, and the callbacks that are left.

    Args:
        runner: whose keys the callbacks name.
        callbacks: of the caller.
        given: the arguments that were given besides.
        by_batch: those that compute with a batch are left.
    """
    settings = _given(given)
    metrics: dict[str, Any] = dict(settings.pop("metrics", None) or {})
    rest = []
    for callback in callbacks:
        if not isinstance(callback, ArgumentCallback):
            rest.append(callback)
            continue
        kind, computes = type(callback).__name__, by_batch and isinstance(callback, Callback)
        rest += [callback] if computes else callback.instead
        for key, value in ({} if computes else callback.keys).items():
            if value != getattr(runner, key):
                raise UserError(
                    f"{kind} asks for {value!r}, and the runner's {key} is "
                    f"{getattr(runner, key)!r}; write the same in both"
                )
        for name, value in callback.settings.items():
            if settings.setdefault(name, value) != value:
                raise UserError(
                    f"{kind} says {name}={value!r}, and {name}={settings[name]!r} was given; leave "
                    "one of them out"
                )
        for name, metric in callback.metrics.items():
            if name in metrics:
                raise UserError(f"two metrics are named {name!r}; write prefix='…' in {kind}")
            metrics[name] = metric
    return {**settings, "metrics": metrics or None}, rest


def only_default(kind: str, **given: Any) -> None:
    """Raise `UserError` for what a callback was given and is not honoured here.

    Args:
        kind: of the callback.
        given: by name, the value and the only one that is honoured.
    """
    for name, (value, default) in given.items():
        if value != default:
            raise UserError(
                f"{kind}({name}={value if isinstance(value, str) else kind_of(value)}): "
                f"only {default!r} is possible here"
            )
