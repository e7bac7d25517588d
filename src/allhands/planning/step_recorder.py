"""Sees every operation of a step that computes nothing: what it holds, computes and sends."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry

from allhands.comm.traffic import Collective, transfer_of
from allhands.compat import (
    TorchDispatchMode,
    group_named,
    in_backward,
    in_fake_kernel,
    pytree,
    real_tensors,
)
from allhands.planning.operation import Form, Operation

# A GPU's memory is given out in blocks of so many bytes.
_BLOCK = 512
# The storages that are held are written down again when they have grown by so much.
_GROWTH = 1.002
_DEVICE = torch.ops.prim.device.default
#: The ranks of groups, by the group's name.
GroupRanks = dict[str, tuple[int, ...]]

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# Before the step that is looked at.
MADE = "made"
ELSEWHERE = "elsewhere"


class Storages:
    """The storages of tensors without data, and how many bytes they would take.

    Attributes:
        held: bytes of all that are alive.
        peak: the most since `forget`.
    """

    def __init__(self) -> None:
        # By address: number, bytes and phase.
        self._alive: dict[int, tuple[int, int, str]] = {}
        self._watched: dict[int, Any] = {}
        self._at_peak: list[tuple[int, int, str]] = []
        self._count = 0
        self._noted = 0.0
        self.held = self.peak = 0

    def add(self, tensor: torch.Tensor, phase: str) -> None:
        """A tensor has come in this phase of a step."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = _rounded(storage.nbytes())
        self._count += 1
        self._alive[key] = self._count, size, phase
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._grow(size)

    def add_elsewhere(self, tensor: torch.Tensor) -> None:
        """A tensor lies in another memory."""
        self.add(tensor, ELSEWHERE)
        number, size, phase = self._alive[key := tensor.untyped_storage()._cdata]
        self._alive[key] = number, 0, phase
        self._grow(-size)

    def resized(self, storage: torch.UntypedStorage, phase: str) -> None:
        key = storage._cdata
        if key in self._alive:
            number, before, kind = self._alive[key]
            size = _rounded(storage.nbytes())
            self._alive[key] = number, size, kind if before else phase
            self._grow(size - before)

    def numbers(self, tensors: Iterable[Any]) -> set[int]:
        """The numbers of the storages of tensors, or of the parts of them that this rank holds."""
        found = set()
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if isinstance(local, torch.Tensor):
                found.add(self._alive.get(local.untyped_storage()._cdata, (0, 0, ""))[0])
        return found - {0}

    def _gone(self, key: int) -> None:
        _, size, _ = self._alive.pop(key, (0, 0, ""))
        self._watched.pop(key, None)
        self.held -= size

    def _grow(self, size: int) -> None:
        self.held += size
        if self.held > self.peak:
            self.peak = self.held
            if self.held > self._noted * _GROWTH:
                self._noted = self.held
                self._at_peak = list(self._alive.values())

    def forget(self) -> None:
        """Begin anew with the most that is held, which was made before what follows."""
        self._alive = {
            key: (number, size, phase if phase == ELSEWHERE else MADE)
            for key, (number, size, phase) in self._alive.items()
        }
        self.peak, self._noted, self._at_peak = self.held, self.held, list(self._alive.values())

    def by_kind(self, kinds: dict[str, set[int]]) -> dict[str, int]:
        """Bytes at the peak by kind: of the storages with the numbers in `kinds`, and of the others
        by the phase of a step in which they came."""
        found: Counter[str] = Counter()
        for number, size, phase in self._at_peak:
            kind = next((name for name, numbers in kinds.items() if number in numbers), phase)
            found[kind] += size
        return dict(found)


class StepRecorder(TorchDispatchMode):
    """Within, under PyTorch's FakeTensorMode, operations are written down.

    Numbers that no tensor without data has a part in are computed for real: with them ranks tell
    one another what each has.

    Args:
        mode: in which the step is taken.

    Attributes:
        storages: what is held.
        events: operations and collectives, in their order, each with its phase; empty until
            `records` is set.
        groups: of the collectives.
        records: whether events are written down.
        phase: the phase outside of backward passes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.storages = Storages()
        self.events: list[tuple[str, Operation | Collective]] = []
        self.groups: GroupRanks = {}
        self.records = False
        self.phase = FORWARD
        self._known: dict[Any, Operation] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in it, and to say so takes as long as an operation

    def forget(self) -> None:
        """Begin anew with what is held, and no events."""
        self.storages.forget()
        self.events = []

    def note(self, transfer: Collective) -> None:
        """A message to or from a parameter server."""
        if self.records:
            self.events.append((self.phase_now, transfer))

    @property
    def phase_now(self) -> str:
        return BACKWARD if self.phase == FORWARD and in_backward() else self.phase

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _DEVICE and isinstance(args[0], FakeTensor):  # which is asked for often
            return args[0].fake_device
        if _is_view(function) and self._is_own(args[0]):
            return self._view(function, args, kwargs)
        given = _tensors((args, kwargs))
        if function.namespace in ("c10d", "_c10d_functional"):
            transfer = transfer_of(function, args)
            if self.records and transfer is not None and transfer.size > 1:
                if transfer.group not in self.groups:
                    ranks = dist.get_process_group_ranks(group_named(transfer.group))
                    self.groups[transfer.group] = tuple(ranks)
                self.events.append((self.phase_now, transfer))
            if any(isinstance(one, FakeTensor) for one in given):
                result = self._called(function, args, kwargs, given)
            else:
                with real_tensors():
                    result = function(*args, **kwargs)
                    _as_if_alike(transfer, args)
        elif _is_real(function, given, args, kwargs):
            with real_tensors():
                return function(*args, **kwargs)
        elif function is torch.ops.aten._local_scalar_dense.default:
            return _likely(given[0])
        else:
            result = None
            if not (_is_update(function) and all(map(self._is_own, given))):
                result = function(*args, **kwargs)
            if self.records:
                self._note(function, args, kwargs, given, result)
        phase = self.phase_now
        for tensor in _tensors(result):
            # A strategy may ask a mode of its own for shapes, which takes no memory.
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
                self.storages.add(tensor, phase)
        return result

    def _is_own(self, value: Any) -> bool:
        return type(value) is FakeTensor and value.fake_mode is self._mode

    def _called(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
    ) -> Any:
        """A collective on tensors without data, of which nobody takes more than when it ends."""
        if function.namespace == "c10d" and all(map(self._is_own, given)):
            with in_fake_kernel(self._mode):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _view(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode gives for a view, which takes no memory, without the keys of its cache."""
        self.storages.add(args[0], self.phase_now)
        with in_fake_kernel(self._mode):
            found = function(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(found, torch.Tensor):
            return FakeTensor(self._mode, found, device)
        return type(found)(FakeTensor(self._mode, one, device) for one in found)

    def _note(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        result: Any,
    ) -> None:
        made = _tensors(result) or _written(function, args)
        if not made or _is_view(function):
            return
        key = (
            function,
            tuple((tuple(one.shape), one.dtype) for one in given),
            tuple((tuple(one.shape), one.dtype) for one in made),
        )
        operation = self._known.get(key)
        if operation is None:
            count = flop_registry.get(function.overloadpacket)
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            moved = sum(one.nbytes for one in given) + sum(one.nbytes for one in made)
            widths = [one.element_size() for one in given if one.is_floating_point()]
            call = pytree.tree_map(_form, (args, kwargs))
            operation = self._known[key] = Operation(
                str(function), int(flops), moved, min(widths, default=4), function, call
            )
        self.events.append((self.phase_now, operation))


def _as_if_alike(transfer: Collective | None, args: tuple[Any, ...]) -> None:
    """Fill what a collective has given of real numbers, as if all ranks had those of this one.

    Sums stay what this rank has: flags that none has raised.
    """
    if transfer is None:
        return
    if transfer.kind == "all_gather":
        pairs = zip(*args[:2], strict=True) if isinstance(args[0], list) else [args[:2]]
        for out, own in pairs:
            for part in out if isinstance(out, list) else [out.view(-1, *own.shape)]:
                part.copy_(own)
    elif transfer.kind == "recv":  # a vote of PyTorch's stages on whether all shapes are known
        for tensor in args[0]:
            tensor.fill_(1)


def storage_resizing(recorder: StepRecorder) -> Callable[[], None]:
    """See storages that are given another size in place; returns what ends that."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        recorder.storages.resized(storage, recorder.phase_now)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def end() -> None:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    return end


def _form(value: Any) -> Any:
    """Of a tensor what another one like it can be made of."""
    if not isinstance(value, torch.Tensor):
        return value
    return Form(tuple(value.shape), tuple(value.stride()), value.dtype)


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_real(
    function: Any, given: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether all that an operation is given is real, or it makes whole numbers of nothing."""
    if given:
        return not any(isinstance(one, FakeTensor) for one in given)
    dtype = kwargs.get("dtype")
    if dtype is None:
        counts = function.overloadpacket is torch.ops.aten.arange
        return counts and all(isinstance(one, int) for one in args)
    return function.namespace == "aten" and not (dtype.is_floating_point or dtype.is_complex)


def _likely(tensor: torch.Tensor) -> Any:
    """What stands in for a number that only a real step has."""
    return 0.0 if tensor.is_floating_point() else bool(tensor.dtype == torch.bool)


@cache
def _is_view(function: Any) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


@cache
def _is_update(function: Any) -> bool:
    """Whether it changes tensors in place, many at once, and gives nothing."""
    name = function._schema.name
    return not function._schema.returns and name.startswith(("aten::_foreach_", "aten::_fused_"))


def _written(function: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    given = zip(function._schema.arguments, args, strict=False)
    return _tensors([one for place, one in given if place.is_write])
