"""All that a server holds, and back: for workers that save, for snapshots, and for copies on other
servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from allhands.kvstore.parts import by_part

# What is no tensor, as JSON has it; and tensors by ``number\tname``.
Whole = tuple[dict[str, Any], dict[str, torch.Tensor]]


def settings_of(shard: Any) -> dict[str, Any]:
    """What the workers have set, the forms of all parts, and who is counted on."""
    spec = shard.spec
    return {
        "keys": shard.keys,
        "sets": shard.sets,
        "compression": shard.compression,
        "optimizer": None if spec is None else {"name": spec.name, "groups": list(spec.groups)},
        "forms": [part.form() for part in list(shard.parts.values())],
        "live": sorted(shard.members.everyone()),
        "passed": shard.passed,
    }


def whole_of(shard: Any, taken: Iterable[Whole] = ()) -> Whole:
    """All of a shard. Parts that were `taken` before, by `KeyPart.whole`, are not taken again."""
    parts = list(taken)
    have = {fields["part"] for fields, _ in parts}
    parts += [one.whole() for one in list(shard.parts.values()) if one.number not in have]
    tensors = {name: value for _, own in parts for name, value in own.items()}
    return {"settings": settings_of(shard), "parts": [fields for fields, _ in parts]}, tensors


def load_whole(shard: Any, whole: Whole) -> None:
    """Continue from what `whole_of` gave.

    Raises:
        UserError: the optimizer cannot run here.
    """
    fields, tensors = whole
    shard.rebuild(fields["settings"])
    for one in fields["parts"]:
        shard.parts[one["part"]].load_whole(one, tensors)


def state_of(shard: Any) -> dict[str, torch.Tensor]:
    """The optimizer's states of all parts, and the rows, as `KeyPart.copies` gives them."""
    found: dict[str, torch.Tensor] = {}
    for part in list(shard.parts.values()):
        found |= part.copies(False)
    return found


def load_state(shard: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Continue from what `state_of` gave.

    Raises:
        UserError: it is not of this server's parts, or of another optimizer.
    """
    for number, states in by_part(tensors).items():
        part = shard.parts[number]
        with part.lock:
            part.load(states)
