"""The units of a sharded model, gathered in the same order on every rank, whatever a rank's samples
pass through.

fully_shard gathers a unit when it is called, and adds its gradients up over the ranks after its
backward pass. So a unit that only some ranks call (an expert, the head of a task, a block that is
skipped) would set the ranks at odds. Here every rank passes all units in one order: before a unit
is called, those before it that were not are gathered and let go of. A token goes from unit to unit
beside the activations, so that the backward pass goes through all of them too, in the reverse
order. A gradient that a rank has not made counts as 0 there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from allhands.comm import all_gather_text, calls
from allhands.compat import apply_to_tensors, in_backward
from allhands.errors import UserError
from allhands.world import World


class Unit:
    """A module that is gathered as one.

    Attributes:
        name: in the model; "" of the model itself.
        module: to which fully_shard was applied.
        state: fully_shard's, of this module.
        groups: fully_shard's records of the parameters that are gathered together; none without
            parameters.
        parent: the innermost unit around it.
        children: the units whose parent it is, in the order in which they are passed.
        seen: those that were called, in the order of their first calls.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.state = module._get_fsdp_state()
        groups = getattr(self.state, "_fsdp_param_groups", None)
        self.groups: list[Any] = [
            g
            for g in ([self.state._fsdp_param_group] if groups is None else groups)
            if g is not None
        ]
        self.parent: Unit | None = None
        self.children: list[Unit] = []
        self.seen: list[Unit] = []

    def records(self) -> Iterator[Any]:
        """fully_shard's record of each parameter that is gathered with this unit."""
        for group in self.groups:
            yield from group.fsdp_params

    @property
    def trains(self) -> bool:
        """Whether it has gradients to add up."""
        return any(record.sharded_param.requires_grad for record in self.records())


class Units:
    """The units of one sharded model, or of a stage of one. Before and after fully_shard, they are
    told each module.

    Args:
        strategy: the name of the strategy, for messages.

    Attributes:
        all: the units, inner ones first; the last is the model.
        used: ids of the parameters (shards) that have got a gradient on this rank since the last
            `clear`.
    """

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.all: list[Unit] = []
        self.used: set[int] = set()
        self._of: dict[int, Unit] = {}
        # A pass has begun, or its gradient has come back, since the last `clear`.
        self._called = self._returned = False
        self._waiting: set[int] = set()  # groups whose gradients are yet to be added up
        # The units that are being called, and how many children of each were passed.
        self._open: list[tuple[Unit, int]] = []
        self._token = torch.zeros(())
        self._recording = False

    def before(self, module: nn.Module) -> None:
        """To be called right before fully_shard is applied to a module."""
        module.register_forward_hook(_outside_graphs(self._complete))

    def after(self, name: str, module: nn.Module) -> None:
        """To be called right after that; inner modules first."""
        unit = self._of[id(module)] = Unit(name, module)
        inside = set(map(id, module.modules()))
        unit.children = [
            other for other in self.all if other.parent is None and id(other.module) in inside
        ]
        for child in unit.children:
            child.parent = unit
        order = {key: number for number, key in enumerate(map(id, module.modules()))}
        unit.children.sort(key=lambda child: order[id(child.module)])
        self.all.append(unit)
        module.register_forward_pre_hook(
            _outside_graphs(self._enter), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(_outside_graphs(self._leave))
        for group in unit.groups:
            self._take_over(group)

    # ------------------------------------------------------------------ a step

    def follow(self) -> None:
        """Optimizer steps follow: let layers that were frozen or unfrozen get gradients as their
        parameters say."""
        for unit in self.all:
            for record in unit.records():
                if hasattr(record, "_unsharded_param"):
                    record._unsharded_param.requires_grad_(record.sharded_param.requires_grad)
            for group in unit.groups:
                group._init_mp_dtypes()  # of what is trained

    def drop(self, shard: torch.Tensor) -> None:
        """Gather a parameter no longer: another tensor has taken its place in the module."""
        for unit in self.all:
            for group in unit.groups:
                group.fsdp_params = [
                    record for record in group.fsdp_params if record.sharded_param is not shard
                ]
            unit.groups = [group for group in unit.groups if group.fsdp_params]
            if hasattr(unit.state, "_fsdp_param_groups"):
                unit.state._fsdp_param_groups = unit.groups
            elif not unit.groups:  # before PyTorch 2.13
                unit.state._fsdp_param_group = None

    def check(self) -> None:
        """After the backward passes of a step.

        Raises:
            UserError: none has come through the model's output, so that no gradient was added up.
        """
        if self._called and not self._returned:
            self._refuse_output()

    def _refuse_output(self) -> NoReturn:
        raise UserError(
            f"strategy '{self.strategy}': the loss has no gradient with respect to the tensors in "
            "the model's output. Let the model return tensors, or tuples, lists, dicts or "
            "dataclasses of them, and compute the loss from these"
        )

    def clear(self) -> None:
        """A step is over."""
        self.used.clear()
        self._called = self._returned = False

    def agree(self, world: World) -> None:
        """After the first step: pass units in the order in which they are called, which need not be
        that of the modules.

        All ranks of the world call it together.
        """
        mine = {
            self._key(unit): [child.name for child in unit.seen]
            for unit in self.all
            if unit.children
        }
        told = [json.loads(text) for text in all_gather_text(json.dumps(mine), world)]
        for unit in self.all:
            key = self._key(unit)
            orders: list[list[str]] = [order[key] for order in told if key in order]
            longest: list[str] = max(orders, key=len, default=[])  # the first of these
            place = {name: number for number, name in enumerate(longest)}
            last, keys = -1, {}
            # One that nobody has called follows the one that it follows in the model.
            for child in unit.children:
                last = place.get(child.name, last)
                keys[child.name] = last
            unit.children.sort(key=lambda child: keys[child.name])

    @staticmethod
    def _key(unit: Unit) -> str:
        """The same on all ranks that have the unit; stages of a pipeline differ."""
        return " ".join(sorted(child.name for child in unit.children))

    # ------------------------------------------------------------------ calls

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():
            return None
        unit = self._of[id(module)]
        given = _tensors((args, kwargs))
        if unit.parent is None:
            self._open.clear()  # a call that has failed may have left some
            self._recording = torch.is_grad_enabled()
            self._called = self._called or self._recording
            self._token = torch.zeros((), device=unit.state._device, requires_grad=self._recording)
            self._open.append((unit, 0))
            return None  # fully_shard ends its backward pass when all others have
        self._pass_up_to(unit, bool(given))
        self._open.append((unit, 0))
        return _replaced((args, kwargs), self._record(unit, _End, given, bool(given)))

    def _complete(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module has been computed, and is still gathered: pass what it has not called."""
        if in_backward():
            return
        unit, passed = self._open[-1]
        if len(unit.children) > passed:
            flowing = bool(_tensors(output))
            for child in unit.children[passed:]:
                self._pass(child, flowing)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return output
        unit, _ = self._open.pop()
        if unit.parent is None and not self._recording:
            unit.module.reshard()  # no backward pass follows, and callbacks are to find shards
        made = _tensors(output)
        if unit.parent is None and self._recording and not made:
            # no gradient can come back, and the ranks' backward passes would not meet
            self._refuse_output()
        return _replaced(output, self._record(unit, _Begin, made, bool(made)))

    def _pass_up_to(self, unit: Unit, flowing: bool) -> None:
        """Pass the units that come before this one, which is about to be called."""
        around = self._open[-1] if self._open else None
        assert unit.parent is not None
        if around is None or around[0] is not unit.parent:
            raise UserError(
                f"strategy '{self.strategy}' gathers '{unit.name}' within a call of "
                f"{self._named(unit.parent)}, and it is called outside of one. Call the model "
                "itself, and let its forward() call its parts; or use distributed='ddp'"
            )
        parent, passed = around
        if unit not in parent.seen:
            parent.seen.append(unit)
        place = parent.children.index(unit)
        if place < passed:
            # It is called again, or in another order: all are passed once more.
            calls.note("gathering the model's layers once more")
            for child in parent.children[passed:]:
                self._pass(child, flowing)
            passed = 0
        for child in parent.children[passed:place]:
            self._pass(child, flowing)
        self._open[-1] = parent, place + 1

    @staticmethod
    def _named(unit: Unit) -> str:
        return f"'{unit.name}'" if unit.name else "the model"

    def _pass(self, unit: Unit, flowing: bool) -> None:
        """Take part in what the ranks do that call this unit.

        Args:
            unit: one that this rank does not call.
            flowing: gradients come through it on the ranks that do, though it may be frozen.
        """
        self._record(unit, _End, [], flowing)
        for group in unit.groups:
            group.pre_forward(unit.module, (), {})
        for child in unit.children:
            self._pass(child, flowing)
        for group in unit.groups:
            group.post_forward(unit.module, None, None)
        self._record(unit, _Begin, [], flowing)

    def _record(
        self, unit: Unit, kind: Any, tensors: list[torch.Tensor], flowing: bool
    ) -> list[torch.Tensor]:
        """Let the token, and tensors with gradients, pass a point at which the backward pass of a
        unit begins or ends."""
        if not self._recording or not (flowing or unit.parent is None or unit.trains):
            return tensors
        # The model may have switched gradients off for some of its layers.
        with torch.enable_grad():
            self._token, *given = kind.apply(self, unit, self._token, *tensors)
        return given

    # ------------------------------------------------------------------ the backward pass

    def begin_backward(self, unit: Unit) -> None:
        if unit.parent is None:
            self._returned = True
        unit.state._pre_backward(None)

    def _take_over(self, group: Any) -> None:
        """Know when a group's gradients are to be added up, and complete them before."""
        begin, end = group.pre_backward, group.post_backward
        hooked = group._register_post_backward_hook

        def pre_backward(*args: Any) -> None:
            self._waiting.add(id(group))
            begin(*args)

        def post_backward(*args: Any) -> None:
            if group.reduce_grads and id(group) in self._waiting:
                self._waiting.discard(id(group))
                self._fill(group)
            end(*args)

        def register(args: Any, kwargs: Any) -> Any:
            # In what is computed again in the backward pass, the units have no part.
            return hooked(args, kwargs) if in_backward() else (args, kwargs)

        group.pre_backward, group.post_backward = pre_backward, post_backward
        group._register_post_backward_hook = register

    def _fill(self, group: Any) -> None:
        for record in group.fsdp_params:
            whole = getattr(record, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is not None and whole.grad.is_sparse:
                whole.grad = whole.grad.to_dense()
            if whole.grad is not None or record.unsharded_accumulated_grad is not None:
                self.used.add(id(record.sharded_param))
            elif whole.requires_grad:
                whole.grad = torch.zeros_like(whole, requires_grad=False)


class _Begin(torch.autograd.Function):
    """Behind a unit: its backward pass begins here. The outputs are nobody's views, so that they
    may be changed in place."""

    @staticmethod
    def forward(
        ctx: Any, units: Units, unit: Unit, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.units, ctx.unit = units, unit
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.units.begin_backward(ctx.unit)
        return (None, None, *gradients)


class _End(torch.autograd.Function):
    """In front of a unit: its backward pass ends here."""

    @staticmethod
    def forward(
        ctx: Any, units: Units, unit: Unit, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for group in reversed(ctx.unit.groups):
            group.post_backward()
        return (None, None, *gradients)


def _outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that a compiler leaves alone, as it does with those of fully_shard."""

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(hook, recursive=True)(*args, **kwargs)
        return hook(*args, **kwargs)

    return called


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those that require gradients."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    apply_to_tensors(look, tree)
    # PyTorch's function refers to itself, and holds `look` until garbage is collected: an output
    # may not be in it.
    tensors = list(found)
    found.clear()
    return tensors


def _replaced(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree with others in the place of those."""
    others = tensors[::-1]  # empty in the end, for the same reason
    return apply_to_tensors(lambda tensor: others.pop() if tensor.requires_grad else tensor, tree)
