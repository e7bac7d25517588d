"""Which members of a batch are the model's inputs, which its target, and which of its output is
measured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from allhands.data import named_members
from allhands.errors import UserError, did_you_mean, kind_of

#: One key; several; or several by the name under which they are passed on.
Keys = str | Sequence[str] | Mapping[str, str]


def check_keys(option: str, given: Any) -> Any:
    """`given` as a str, a list or a dict of str."""
    if isinstance(given, str):
        return given
    keys = list(given.values()) if isinstance(given, Mapping) else given
    if (
        isinstance(keys, (list, tuple))
        and keys
        and all(isinstance(key, str) for key in [*given, *keys])
    ):
        if len(set(given)) != len(given):
            raise UserError(f"{option}={given!r} names a key twice; name each once")
        return dict(given) if isinstance(given, Mapping) else list(given)
    argument = "an argument of the model" if option == "input_key" else "a name"
    raise UserError(
        f"{option}={given!r}; it must be a key of the batches such as 'image', a list of keys, or "
        f"a dict of {argument} to a key"
    )


def missing_key(option: str, keys: Keys, batch: Mapping[str, Any]) -> UserError | None:
    """What is wrong where a batch does not have one of the keys."""
    for key in _listed(keys):
        if key not in batch:
            return UserError(
                f"a batch has the keys {', '.join(map(repr, batch))} and no "
                f"{key!r}{did_you_mean(key, map(str, batch), ';')} "
                f"write SupervisedRunner({option}=…)"
            )
    return None


def inputs_of(
    batch: Mapping[str, Any], keys: Keys, by_name: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments that a model is called with; `by_name`: a list is passed
    as keyword arguments."""
    if isinstance(keys, str):
        return (batch[keys],), {}
    if isinstance(keys, Mapping):
        return (), {argument: batch[key] for argument, key in keys.items()}
    if by_name and len(keys) > 1:
        return (), {key: batch[key] for key in keys}
    return tuple(batch[key] for key in keys), {}


def target_in(batch: Mapping[str, Any], keys: Keys) -> Any:
    """The target; a dict where there are several keys. None where one of them is missing: batches
    to predict have none."""
    if isinstance(keys, str):
        return batch.get(keys)
    if not all(key in batch for key in _listed(keys)):
        return None
    return {
        name: batch[key]
        for name, key in (
            keys.items() if isinstance(keys, Mapping) else zip(keys, keys, strict=True)
        )
    }


def takes_by_name(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether the `forward` of a model has arguments of these names and needs no others."""
    inner: Any = model
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = inner.module
    inner = getattr(inner, "_orig_mod", inner)  # of a compiled model
    try:
        inspect.signature(inner.forward).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def check_output_key(key: Any) -> str | None:
    """`key`; raises `UserError` where it is neither a str nor None."""
    if key is not None and (not isinstance(key, str) or not key):
        raise UserError(
            f"output_key={key!r}; it must be the name of what criterion and metrics take of the "
            "model's output, such as 'logits', or None for all of it"
        )
    return key


def chosen_output(output: Any, key: str | None) -> Any:
    """What `output_key` names in a model's output."""
    if key is None:
        return output
    members = named_members(output)
    if members is None:
        raise UserError(
            f"output_key={key!r}, and the model's output is {kind_of(output)}, which names "
            "nothing; leave output_key out, or let handle_batch return what is meant"
        )
    if key not in members:
        raise UserError(
            f"output_key={key!r}, and the model's output has {', '.join(map(repr, members))}"
            f"{did_you_mean(key, map(str, members), '')}"
        )
    return members[key]


def _listed(keys: Keys) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    return list(keys.values()) if isinstance(keys, Mapping) else list(keys)
