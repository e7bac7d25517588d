"""What server and site must agree on before they train together, and in what they differ, in
words."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import ExecutorContext
from allhands.federated.strategy import Federated
from allhands.federated.update_compression import Coded
from allhands.version import __version__

Description = dict[str, Any]
_AT_MOST = 5  # differences that are told


def describe(
    work: ExecutorContext, server: Server, strategy: Federated, labels: Sequence[str] | None = None
) -> Description:
    """A training as plain values that JSON can carry: the version, the model's tensors, how clients
    train, and the classes.

    What only the server decides (rounds, cohorts) is left out. To be made before a schedule or a
    checkpoint has changed the optimizer's options.

    Args:
        work: the training.
        server: whose layout it is.
        strategy: its settings.
        labels: names of the classes, in their order; None: not known.
    """
    layout, local = server.layout, work.local
    buffers = dict(work.model.named_buffers())
    settings = {
        "seed": work.seed,
        "local_epochs": local.epochs if local.steps is None else None,
        "local_steps": local.steps,
        "batch_size": local.batch_size,
        "drop_last": local.drop_last,
        "clip_norm": local.clip_norm,
        "precision": local.precision,
        "criterion": repr(local.criterion)
        if isinstance(local.criterion, nn.Module)
        else _name(local.criterion),
        "optimizer": local.optimizer.kind.__name__,
        "local_layers": list(strategy.local_layers),
        "test_fraction": strategy.test_fraction,
        **_options("algorithm", work.algorithm),
        **_options("compress", strategy.compression),
        **_options("privacy", strategy.privacy),
    }
    for group, options in enumerate(local.optimizer.options):
        for name, value in options.items():
            settings[
                f"optimizer.{name}" if group == 0 else f"optimizer.{name} of group {group}"
            ] = _plain(value)
    return {
        "allhands": __version__,
        "dtype": str(layout.dtype),
        "weights": [[place.name, list(place.shape)] for place in layout.places],
        "groups": [list(bounds) for bounds in layout.groups],
        "integers": [[name, list(buffers[name].shape)] for name in layout.integers],
        "frozen": _frozen(work.model, {place.name for place in layout.parameters}),
        "settings": settings,
        "labels": None if labels is None else [str(label) for label in labels],
    }


def differences(here: Description, there: Description) -> list[str]:
    """In what a site's description (`here`) is not the server's (`there`), each as a sentence
    without a full stop; the first ones of many. Nothing in `there` is believed."""
    try:
        found = _differences(here, there)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return ["the server's description cannot be read"]
    more = len(found) - _AT_MOST
    return found[:_AT_MOST] + ([f"and {more} more"] if more > 0 else [])


def _differences(here: Description, there: Description) -> list[str]:
    if here["allhands"] != there["allhands"]:
        return [
            f"allhands is {here['allhands']} here and {there['allhands']} at the server; install "
            "the server's version"
        ]
    found = []
    for what in ("weights", "integers"):
        found += _tensors(dict(map(tuple, here[what])), dict(map(tuple, there[what])))
    if not found and [here[what] for what in ("weights", "integers")] != [
        there[what] for what in ("weights", "integers")
    ]:
        found.append("the model's tensors are the server's in another order")
    if here["dtype"] != there["dtype"]:
        found.append(
            f"the model's weights are {here['dtype']} here and {there['dtype']} at the server"
        )
    if not found and here["groups"] != there["groups"]:
        found.append("the optimizer's groups hold other weights here than at the server")
    if not found and here["frozen"] != there["frozen"]:
        found.append(
            "the weights that are not trained are others here than at the server; load the same "
            "file at both"
        )
    settings, theirs = here["settings"], there["settings"]
    for name in dict.fromkeys([*settings, *theirs]):
        if settings.get(name) != theirs.get(name):
            found.append(
                f"{name} is {settings.get(name)!r} here and {theirs.get(name)!r} at the server"
            )
    if (
        here["labels"] is not None
        and there["labels"] is not None
        and here["labels"] != there["labels"]
    ):
        found.append(
            f"the classes are {_list(here['labels'])} here and {_list(there['labels'])} at the "
            "server"
        )
    return found


def _tensors(here: dict[str, list[int]], there: dict[str, list[int]]) -> list[str]:
    found = [
        f"the model has no '{name}' here, and the server's has one"
        for name in there
        if name not in here
    ]
    found += [
        f"the model has a '{name}' here, and the server's has none"
        for name in here
        if name not in there
    ]
    return found + [
        f"the model's '{name}' is {there[name]} at the server and {shape} here"
        for name, shape in here.items()
        if name in there and shape != there[name]
    ]


def _options(what: str, made: Any) -> dict[str, Any]:
    """The name of an object and the arguments with which it was made, as far as it keeps them."""
    if made is None:
        return {what: None}
    if isinstance(made, Coded):
        return {
            what: made.name,
            **{f"{what}.{name}": value for name, value in made.options.items()},
        }
    takes = [name for name in inspect.signature(type(made)).parameters if hasattr(made, name)]
    return {
        what: getattr(made, "name", _name(type(made))),
        **{f"{what}.{name}": _plain(getattr(made, name)) for name in takes},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else _name(value)


def _name(value: Any) -> str:
    """What something is called in code; never its place in memory, which differs from process to
    process."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _frozen(model: nn.Module, trained: set[str]) -> str:
    """A checksum of the parameters that are not trained and never sent; empty where there are
    none."""
    frozen = [
        (name, parameter) for name, parameter in model.named_parameters() if name not in trained
    ]
    if not frozen:
        return ""
    found = hashlib.sha256()
    for name, parameter in frozen:
        found.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        found.update(
            parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def _list(labels: Sequence[str]) -> str:
    return ", ".join(labels[:6]) + (f", … ({len(labels)})" if len(labels) > 6 else "")
