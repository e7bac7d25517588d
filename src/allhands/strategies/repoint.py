"""The user's optimizer, made over the plain model's parameters, working on the parts that this rank
holds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from allhands.comm import all_gather_text
from allhands.errors import UserError
from allhands.strategies.held import Held, Read, nowhere
from allhands.strategies.shards import Shards, taken, working_together
from allhands.world import World

# Each changes an element of a parameter by that element's own gradient and state alone, so that it
# may be given a part.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)


def check_optimizer(optimizer: optim.Optimizer, strategy: str) -> None:
    """Raise `UserError` unless the optimizer can be given parts of parameters."""
    kind = type(optimizer).__name__
    check_elementwise(
        optimizer,
        f"strategy '{strategy}' gives the optimizer parts of parameters, and {kind} may need whole "
        "ones",
    )


def check_elementwise(optimizer: optim.Optimizer, why: str, instead: str = "") -> None:
    """Raise `UserError`, from `why` to `instead`, unless the optimizer can work on some elements
    alone."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    if getattr(optimizer, "elementwise", False):
        _check_own(optimizer)
        return
    known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
    marked = (
        ""
        if kind.__module__.startswith(("torch.", "allhands."))
        else "; or, if each element's update depends on that element's gradient and state alone, "
        f"write `elementwise = True` into the class {kind.__name__}"
    )
    raise UserError(f"{why}. Use one of {known}{marked}{instead}")


def _check_own(optimizer: optim.Optimizer) -> None:
    """Raise `UserError` for an optimizer that says `elementwise`, and keeps what a rank with parts
    would not see."""
    kind = type(optimizer)
    if kind.state_dict is not optim.Optimizer.state_dict:
        raise UserError(
            f"{kind.__name__} has a state_dict() of its own, and here the state lies in parts on "
            "the workers, of which that one "
            "knows nothing. Leave torch.optim.Optimizer's, or write distributed='ddp'"
        )
    groups = {id(group) for group in optimizer.param_groups}
    for inner in working_together(optimizer)[1:]:
        if any(id(group) not in groups for group in inner.param_groups):
            raise UserError(
                f"{kind.__name__} holds a {type(inner).__name__} that has groups of parameters of "
                "its own, which would go on working on whole parameters. Share them "
                "(self.param_groups = inner.param_groups), or write distributed='ddp'"
            )


class Repointed:
    """The optimizer of a training of which each rank holds a part.

    Its groups keep their options and their identity, so that schedulers go on working; their
    parameters become this rank's parts, in the same order. A stage of a pipeline has only some of
    them.

    Args:
        optimizer: the user's.
        plain: the plain model's parameters by name, which it was made over.
        held: by name, what this rank has of each.
        local: by name, the parameter that takes the place of the plain one; those of other stages
            are absent.
        world: the processes.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        plain: Mapping[str, nn.Parameter],
        held: Mapping[str, Held],
        local: Mapping[str, nn.Parameter],
        world: World,
    ) -> None:
        names = {id(parameter): name for name, parameter in plain.items()}
        self.optimizer, self.held, self.local, self.world = optimizer, held, local, world
        self._before = [list(group["params"]) for group in optimizer.param_groups]
        self.names = [[names[id(parameter)] for parameter in members] for members in self._before]
        #: It, and those that it holds, over the same groups.
        self._all = working_together(optimizer)
        for group, members in zip(optimizer.param_groups, self.names, strict=True):
            group["params"] = [local[name] for name in members if name in local]
        for each in self._all:
            before = dict(each.state)
            each.state.clear()
            for name in itertools.chain.from_iterable(self.names):
                state = before.get(plain[name])
                if state and name in local:
                    each.state[local[name]] = {
                        key: self._part(name, value) for key, value in state.items()
                    }

    def _part(self, name: str, value: Any) -> Any:
        """A rank's part of one entry of a parameter's state."""
        kept = self.held[name]
        if (
            not isinstance(value, torch.Tensor)
            or tuple(value.shape) != kept.shape
            or not kept.shape
        ):
            return value
        assert kept.local is not None
        part = torch.zeros_like(kept.local, dtype=value.dtype)
        kept.take(value, part)
        return part

    def added(self, names: Mapping[int, str]) -> list[list[str]]:
        """The names of the parameters in groups that the optimizer has got since.

        Args:
            names: by the id of a parameter that a callback may have given it.

        Raises:
            UserError: groups were taken away or changed, or have a parameter that is not the
                model's.
        """
        groups = self.optimizer.param_groups
        known = [[self.local[n] for n in own if n in self.local] for own in self.names]
        if [len(group["params"]) for group in groups[: len(known)]] != list(map(len, known)):
            raise UserError(
                "the optimizer's groups of parameters were changed between two epochs; add groups "
                "of their own, by optimizer.add_param_group"
            )
        found = []
        for group in groups[len(known) :]:
            if any(id(parameter) not in names for parameter in group["params"]):
                raise UserError(
                    "a group that was added to the optimizer has a parameter that is not the "
                    "model's; add those of `training.model`"
                )
            found.append([names[id(parameter)] for parameter in group["params"]])
        return found

    def take_up(self, groups: list[list[str]], plain: Mapping[str, nn.Parameter]) -> None:
        """Have the optimizer work on this rank's parts of the parameters in groups that it has got,
        of these names."""
        first = len(self.names)
        for group, members in zip(self.optimizer.param_groups[first:], groups, strict=True):
            group["params"] = [self.local[name] for name in members]
            self.names.append(members)
            self._before.append([plain[name] for name in members])

    def _numbered(self) -> Iterator[tuple[int, str]]:
        """All parameters in the order of the plain optimizer's, which numbers them in its
        ``state_dict``."""
        return enumerate(name for members in self.names for name in members)

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's ``state_dict``, with `Held` where a tensor is shaped like its
        parameter. All ranks call it."""
        return self.without_state() | {"state": self._state_of(self.optimizer)}

    def without_state(self) -> dict[str, Any]:
        """The same with the options of the groups alone."""
        groups, index = [], 0
        for group, members in zip(self.optimizer.param_groups, self.names, strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(options | {"params": list(range(index, index + len(members)))})
            index += len(members)
        return {"state": {}, "param_groups": groups}

    def _state_of(self, optimizer: optim.Optimizer) -> dict[int, dict[str, Any]]:
        described: dict[int, dict[str, Any]] = {}
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for index, name in self._numbered():
            if name in self.local:
                entries = optimizer.state.get(self.local[name], {})
                described[index] = {
                    key: self._describe(name, key, value) for key, value in entries.items()
                }
                parts[index] = entries
        known: dict[int, dict[str, Any]] = {}
        for text in all_gather_text(json.dumps(described), self.world):
            known |= {int(index): entries for index, entries in json.loads(text).items() if entries}
        state = {}
        for index, name in self._numbered():
            if index in known:
                mine = parts.get(index, {})
                state[index] = {
                    key: self._entry(name, said, mine.get(key))
                    for key, said in known[index].items()
                }
        return state

    def _describe(self, name: str, key: str, value: Any) -> list[Any]:
        if not isinstance(value, torch.Tensor):
            return ["plain", value]
        dtype = str(value.dtype).removeprefix("torch.")
        local = self.local[name]
        if value.shape == local.shape and self.held[name].shape:
            return ["like", dtype]
        if value.numel() > 1:
            raise UserError(
                f"the optimizer's state '{key}' of '{name}' has the shape {list(value.shape)} and "
                f"the rank's part of it {list(local.shape)}; only states shaped like the "
                "parameter, and single numbers, can be stored"
            )
        return ["number", dtype, list(value.shape), value.item()]

    def _entry(self, name: str, said: list[Any], value: torch.Tensor | None) -> Any:
        if said[0] == "plain":
            return said[1]
        dtype = getattr(torch, said[1])
        if said[0] == "number":
            return torch.full(said[2], said[3], dtype=dtype)
        kept = self.held[name]
        return kept.with_local(value) if value is not None else nowhere(kept.shape, dtype)

    def load_state_dict(self, state: Mapping[str, Any], read: Read) -> None:
        """Go on from a plain optimizer's ``state_dict``, of whose tensors only this rank's slices
        are read.

        Raises:
            ValueError: it is of another optimizer.
        """
        groups = state["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(members) for members in self.names]
        if sizes != own:
            raise ValueError(
                f"its optimizer has groups of {sizes} parameters, and this one of {own}"
            )
        numbers = [number for group in groups for number in group["params"]]
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.optimizer.state.clear()
        for index, name in self._numbered():
            entries = state["state"].get(numbers[index])
            if not entries or name not in self.local:
                continue
            parameter, kept = self.local[name], self.held[name]
            mine: dict[str, Any] = {}
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and (
                    tuple(value.shape) != kept.shape or not kept.shape
                ):
                    mine[key] = self._placed(value, parameter, key, self.optimizer.param_groups)
                elif isinstance(value, (torch.Tensor, tuple)):
                    mine[key] = torch.zeros_like(parameter, requires_grad=False)
                    read(value, kept.with_local(mine[key]))
                else:
                    mine[key] = value
            self.optimizer.state[parameter] = mine

    @staticmethod
    def _placed(
        value: torch.Tensor, parameter: nn.Parameter, key: str, groups: list[dict[str, Any]]
    ) -> torch.Tensor:
        """Where PyTorch's optimizers keep a number: counters on the processor, unless the kernel
        reads them on the device."""
        group = next(
            group for group in groups if any(member is parameter for member in group["params"])
        )
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return value.to(parameter.device) if on_device else value.clone()

    def give_back(self, keep: bool, device: torch.device) -> None:
        """Put the optimizer back over the plain model's parameters, with the whole state where
        `keep` says so.

        All ranks call it together.
        """
        numbered = dict(enumerate(p for members in self._before for p in members))
        for optimizer in self._all:
            whole: dict[torch.Tensor, dict[str, Any]] = {}
            for index, entries in self._state_of(optimizer).items():
                home = numbered[index]
                for key, value in entries.items():
                    made = value
                    if isinstance(value, Held):
                        made = value.whole(device)  # all ranks take part, whoever keeps it
                        made = made.to(home.device) if keep else None
                    if keep:
                        whole.setdefault(home, {})[key] = made
            optimizer.state.clear()
            optimizer.state.update(whole)
        self._put_back()

    def _put_back(self) -> None:
        for group, members in zip(self.optimizer.param_groups, self._before, strict=True):
            group["params"] = members

    def detach(self) -> Shards:
        """Put the optimizer back over the plain model's parameters, without a state and without a
        word to the other ranks; the state of the parameters here."""
        found = taken(self.optimizer, self.local)
        self._put_back()
        return found
