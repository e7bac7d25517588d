"""A stage: its share of the model as a module, what passes between stages, and the model that the
runner sees in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from allhands.data import map_tensors
from allhands.errors import UserError
from allhands.strategies.pipeline_parts import Part, pruned

# A tree of shapes and dtypes: equal ones run through the same buffers.
Signature = Any


def stage_module(
    model: nn.Module, parts: list[Part], precision: Callable[[], AbstractContextManager[Any]]
) -> nn.Module:
    """The module of a stage: of the model's class, sharing with `model` the submodules of `parts`
    under their own names.

    Args:
        model: the whole model.
        parts: what the stage runs, one after another.
        precision: gives the context in which they run.
    """
    root = pruned(model, _uses(parts))

    def forward(value: Any) -> Any:
        with precision():
            for part in parts:
                value = part.run(root, value)
        return value

    root.forward = forward
    return root


def _uses(parts: list[Part]) -> list[str]:
    return [use for part in parts for use in part.uses]


def shared_parameters(model: nn.Module, stages: list[list[Part]]) -> dict[str, dict[int, str]]:
    """Parameters that several stages use: the model's own name for each, and its name in each of
    those stages."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, dict[int, str]] = {}
    for number, parts in enumerate(stages):
        for name, parameter in pruned(model, _uses(parts)).named_parameters():
            found.setdefault(first_name[id(parameter)], {})[number] = name
    return {name: where for name, where in found.items() if len(where) > 1}


def check_all_used(model: nn.Module, parts: list[Part]) -> None:
    """Raise `UserError` when a parameter belongs to no part, so that no stage would train it."""
    used = {id(p) for p in pruned(model, _uses(parts)).parameters()}
    left = [name for name, p in model.named_parameters() if id(p) not in used]
    if left:
        shown = ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else "")
        raise UserError(
            f"no part of the {type(model).__name__}'s chain uses {shown}. Remove them from the "
            "model, or name them in chain() with the method that uses them"
        )


class Ghost:
    """The whole chain without memory: it tells what each stage gives for an input, on every rank
    without a message."""

    def __init__(self, model: nn.Module, stages: list[list[Part]], device: torch.device) -> None:
        self.stages = stages
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            with self.mode:
                memo[id(parameter)] = nn.Parameter(
                    self._like(parameter), requires_grad=parameter.requires_grad
                )
        for buffer in model.buffers():
            memo[id(buffer)] = self._like(buffer)
        self.model = copy.deepcopy(model, memo)
        self._known: dict[Signature, list[torch.Tensor]] = {}

    def _like(self, value: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)

    def between(self, value: Any, training: bool) -> list[torch.Tensor]:
        """For each stage but the last what it hands on, as a tensor on the meta device.

        Raises:
            UserError: it is not one floating point tensor, which is what gradients come back for.
        """
        self.model.train(training)
        key = (
            signature(value),
            training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self.device.type),
        )
        if key not in self._known:
            self._known[key] = self._find(value)
        return self._known[key]

    def _find(self, value: Any) -> list[torch.Tensor]:
        given = map_tensors(value, self._like)
        found = []
        with self.mode:
            for number, parts in enumerate(self.stages[:-1]):
                for part in parts:
                    given = part.run(self.model, given)
                if not isinstance(given, torch.Tensor) or not given.is_floating_point():
                    what = (
                        f"a tensor of {given.dtype}"
                        if isinstance(given, torch.Tensor)
                        else f"a {type(given).__name__}"
                    )
                    begins = self.stages[number + 1][0].name
                    raise UserError(
                        f"stage {number + 1} of the pipeline begins at '{begins}' and would be "
                        f"handed {what}; stages pass one floating point tensor on. Cut elsewhere: "
                        "stages=[…] with the names of other parts"
                    )
                found.append(
                    torch.empty(
                        given.shape,
                        dtype=given.dtype,
                        device="meta",
                        requires_grad=given.requires_grad,
                    )
                )
        return found


class NotOnThisStageError(UserError, AttributeError):
    """The part of a model that was asked for is no part of this rank's stages."""


class StagedModel(nn.Module):
    """What the runner trains and evaluates in place of the model: this rank's stages, under the
    model's own names.

    Called with the model's one input, it does what `answer` says.

    Args:
        chunks: the stages' modules.
        names: of parameters that the whole model knows by another name first (the other end of a
            tie).
    """

    answer: Callable[[Any], Any]
    chunks: list[nn.Module]
    names: dict[str, str]

    def __init__(self, chunks: Sequence[nn.Module], names: Mapping[str, str]) -> None:
        super().__init__()
        merged = chunks[0]
        for chunk in chunks[1:]:
            merged = _merge(merged, chunk)
        self.__dict__["_parameters"] = merged._parameters
        self.__dict__["_buffers"] = merged._buffers
        self.__dict__["_modules"] = merged._modules
        self.__dict__["chunks"] = list(chunks)
        self.__dict__["names"] = dict(names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            given = ", ".join([*("…" for _ in args), *(f"{name}=…" for name in kwargs)])
            raise UserError(
                "in a pipeline the model is called with its one input; handle_batch calls it with "
                f"({given})"
            )
        return self.answer(args[0])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise NotOnThisStageError(
                "in a pipeline a rank has the layers of its own stage alone, and here the model "
                f"has no '{name}'; handle_batch calls model(…) with its one input, and a callback "
                "finds what this rank has in training.model.named_modules()"
            ) from None

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, str(key))  # a Sequential's layers have their numbers as names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self.names.get(name, name), parameter

    def train(self, mode: bool = True) -> StagedModel:
        super().train(mode)
        for chunk in self.chunks:
            chunk.train(mode)
        return self


def _merge(one: nn.Module, other: nn.Module) -> nn.Module:
    if one is other:
        return one
    both = copy.copy(one)
    for store in ("_parameters", "_buffers"):
        both.__dict__[store] = one.__dict__[store] | other.__dict__[store]
    modules: dict[str, nn.Module | None] = dict(one._modules)
    for name, child in other._modules.items():
        before = modules.get(name)
        modules[name] = child if before is None or child is None else _merge(before, child)
    both.__dict__["_modules"] = modules
    return both


# ------------------------------------------------------------------ trees of tensors


def signature(value: Any) -> Signature:
    """What two trees of tensors have in common when the same buffers serve for both."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(signature(item) for item in value)
    return type(value).__name__


def rows_of(batch: Any, rows: slice | torch.Tensor, count: int) -> Any:
    """Some samples of a batch of `count`.

    Raises:
        UserError: something in the batch is not a tensor or list of `count` items, so that it
            cannot be cut.
    """
    if isinstance(batch, torch.Tensor):
        if batch.dim() and len(batch) == count:
            return batch[rows.to(batch.device) if isinstance(rows, torch.Tensor) else rows]
        what = f"a tensor of shape {list(batch.shape)}"
    elif isinstance(batch, Mapping):
        return {key: rows_of(item, rows, count) for key, item in batch.items()}
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows_of(item, rows, count) for item in batch))
    elif isinstance(batch, (list, tuple)):
        if len(batch) == count and not _has_tensors(batch):  # a list of one string a sample
            items = (
                range(count)[rows]
                if isinstance(rows, slice)
                else cast("Iterable[int]", rows.tolist())
            )
            return type(batch)(batch[item] for item in items)
        return type(batch)(rows_of(item, rows, count) for item in batch)
    else:
        what = f"a {type(batch).__name__}"
    raise UserError(
        f"a pipeline cuts each batch of {count} samples into micro-batches, and this one holds "
        f"{what}, whose first dimension is "
        "not the samples. Let the data set give tensors with one row a sample"
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    items = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return any(_has_tensors(item) for item in items)
