"""Carries what a worker did to the caller's own objects back into them.

`ship` numbers the objects on their way to the workers, and gives them the same numbers where they
arrive. So a worker can say which of the caller's objects it means. It writes the state of all that
it reaches from some roots (a model, an optimizer, callbacks), and the caller puts each state into
the object that has it: lists stay the same lists, and an optimizer's parameters the model's.
Objects that the worker has made travel whole, and storages that nobody wrote to not at all.

The file is private to the user, and is read by the process that started its writer, as what that
one got is written by it.
"""

from __future__ import annotations

import collections
import io
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.atomic_write import atomic_write
from allhands.launch import ship
from allhands.launch.object_states import (
    MISSING,
    NUMBERS,
    ObjectParts,
    belongings,
    content_of,
    hashable,
    states_of,
    type_name,
)

# They cannot change: they travel whole, and what they hold is referred to.
_VALUES = (*NUMBERS, tuple, frozenset, range, slice)


#: Ends the name of the file, which begins as that of the worker's result.
SUFFIX = "-objects"


@dataclass
class Arrived:
    """In a worker that runs a function of the caller's: what came, and where its state goes."""

    path: str
    numbered: ship.Numbered = field(default_factory=ship.Numbered)
    # Modules, and the parameters and buffers that they had when they came.
    tensors: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)


arrived: Arrived | None = None


def remember(model: Any) -> None:
    """Note a module's parameters and buffers: a tensor that takes the place of one is handed back
    into that one."""
    if arrived is not None:
        arrived.tensors.append((model, _tensors_of(model)))


def write(roots: Mapping[str, Any], leave: Callable[[Any], bool] = lambda _: False) -> list[str]:
    """Hand back the state of the caller's objects that can be reached from `roots`, once; `spawn`
    puts it into them.

    Args:
        roots: by the names that the user knows.
        leave: says of an object that it stays as it is in the caller.

    Returns:
        What cannot be handed back, and why; it stays in the caller as it was.
    """
    if arrived is None:
        return []
    writer = _Writer(arrived, leave)
    writer.write(roots)
    return writer.lost


def _tensors_of(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


# ---------------------------------------------------------------------- in the worker


class _CannotPickle(Exception):
    def __init__(self, part: tuple[int, str, Any], text: str) -> None:
        self.part, self.text = part, text


class _Writer:
    def __init__(self, arrived: Arrived, leave: Callable[[Any], bool]) -> None:
        self.path, self.numbered, self.leave = arrived.path, arrived.numbered, leave
        objects = self.numbered.objects
        self.numbers = {
            id(value): number for number, value in objects.items() if not isinstance(value, _VALUES)
        }
        self.offsets = {
            storage.data_ptr(): offset for offset, storage in self.numbered.storages.items()
        }
        self.unchanged: dict[int, bool] = {}
        self.alive: list[Any] = []
        for model, before in arrived.tensors:
            self._take_places(_tensors_of(model), before)
        self.kept: set[tuple[int, str, Any]] = set()
        self.lost: list[str] = []

    def _take_places(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        present = {id(value) for value in now.values()}
        for name, value in now.items():
            gone = before.get(name)
            if (
                gone is not None
                and id(value) not in self.numbers
                and id(gone) not in present
                and id(gone) in self.numbers
            ):
                self.numbers[id(value)] = self.numbers[id(gone)]
                self.alive.append(value)

    def write(self, roots: Mapping[str, Any]) -> None:
        while True:
            try:
                body, blobs = self._attempt(roots)
            except _CannotPickle as found:
                self.kept.add(found.part)
                self.lost.append(found.text)
                continue
            with atomic_write(Path(self.path)) as aside:
                ship.write(body, blobs, str(aside))
            return

    def _attempt(self, roots: Mapping[str, Any]) -> tuple[io.BytesIO, ship.Blobs]:
        body, blobs = io.BytesIO(), ship.Blobs()
        reached: list[tuple[Any, str]] = []
        seen: set[int] = set()
        owner = ""

        def refer(value: Any) -> int | None:
            number = self.numbers.get(id(value))
            if number is not None and number not in seen:
                seen.add(number)
                reached.append((value, owner))
            return number

        pickler = ship.pickler(body, blobs, refer, self._offset)
        self._dump(pickler, None, ObjectParts("root", list(roots.items())), "")
        done = 0
        while done < len(reached):
            value, owner = reached[done]
            done += 1
            if self.leave(value):
                continue
            owner = _owner(value, owner)
            by_value = self._is_by_value(value)
            for other in belongings(value, by_value):
                refer(other)
            for state in states_of(value, by_value):
                self._dump(pickler, value, state, owner)
        return body, blobs

    def _is_by_value(self, value: Any) -> bool:
        """Whether a function, or a class with its methods, came as such; others were imported
        here."""
        if isinstance(value, types.FunctionType):
            return id(value.__globals__) in self.numbers
        return isinstance(value, type) and (
            value.__module__ == "__main__"
            or any(
                self._is_by_value(item)
                for item in vars(value).values()
                if isinstance(item, types.FunctionType)
            )
        )

    def _dump(self, pickler: Any, value: Any, state: ObjectParts, owner: str) -> None:
        number = self.numbers.get(id(value), -1)
        kept = [key for key, _ in state.parts if (number, state.kind, hashable(key)) in self.kept]
        parts = [
            (key, item)
            for key, item in state.parts
            if (number, state.kind, hashable(key)) not in self.kept
        ]
        try:
            pickler.dump((state.kind, value, state.about, state.whole, parts, kept))
        except Exception as error:
            for key, item in parts:
                why = self._trial(item)
                if why is not None:
                    text = (
                        f"{owner or 'the'} {_part(state.kind, key)}, {type_name(item)}: {why}"
                    ).strip()
                    raise _CannotPickle((number, state.kind, hashable(key)), text) from error
            raise

    def _trial(self, item: Any) -> str | None:
        try:
            ship.pickler(
                io.BytesIO(), ship.Blobs(), lambda value: self.numbers.get(id(value)), self._offset
            ).dump(item)
        except Exception as error:
            return (str(error) or type(error).__name__).partition("\n")[0]
        return None

    def _offset(self, storage: Any) -> int | None:
        """Where in the caller's file a storage is that nobody has written to."""
        offset = self.offsets.get(storage.data_ptr()) if storage.device.type == "cpu" else None
        if offset is not None and offset not in self.unchanged:
            self.unchanged[offset] = self.numbered.is_unchanged(offset, storage)
        return offset if offset is not None and self.unchanged[offset] else None


def _owner(value: Any, owner: str) -> str:
    if isinstance(value, (types.FunctionType, dict, list, set, collections.deque)):
        return owner
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def _part(kind: str, key: Any) -> str:
    return str(key) if isinstance(key, str) and kind != "dict" else f"[{key!r}]"


# ---------------------------------------------------------------------- in the caller


def apply(path: str, numbered: ship.Numbered) -> list[str]:
    """Put what a worker has written into the caller's objects.

    Args:
        path: what the worker has written.
        numbered: the objects that were sent.

    Returns:
        What could not be put back, and why.
    """
    lost = []
    for kind, target, about, whole, parts, kept in list(ship.load_all(path, numbered)):
        try:
            if kind != "root":
                _PUT[kind](target, about, whole, parts, set(map(hashable, kept)))
        except Exception as error:
            lost.append(f"{type_name(target)}: {error}")
    return lost


def _put_tensor(
    target: Any, requires_grad: bool, _whole: bool, parts: list[Any], _kept: set[Any]
) -> None:
    import torch

    for _, value in parts:
        with torch.no_grad():
            if torch.nn.parameter.is_lazy(target):
                target.materialize(value.shape)
            alike = (
                target.shape == value.shape
                and target.dtype == value.dtype
                and target.layout == value.layout
            )
            if not (alike and target.layout is torch.strided):
                target.data = value.to(target.device, copy=True)
            elif target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
                try:
                    target.detach().copy_(value)
                except RuntimeError:  # several of its elements are one in memory
                    target.data = value.to(target.device, copy=True)
        if target.is_leaf and target.requires_grad != requires_grad:
            target.requires_grad_(requires_grad)


def _put_array(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    for _, value in parts:
        if target.shape != value.shape or target.dtype != value.dtype:
            target.resize(value.shape, refcheck=False)
        if target.flags.writeable:
            target[...] = value


def _put_dict(target: Any, _about: Any, _whole: bool, parts: list[Any], kept: set[Any]) -> None:
    before = list(target.items())
    if (
        len(before) == len(parts)
        and not kept
        and all(
            old[0] is new[0] and old[1] is new[1] for old, new in zip(before, parts, strict=True)
        )
    ):
        return
    base: Any = collections.OrderedDict if isinstance(target, collections.OrderedDict) else dict
    base.clear(target)
    for key, item in [*parts, *((key, item) for key, item in before if hashable(key) in kept)]:
        base.__setitem__(target, key, item)


def _put_list(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    for _, items in parts:
        if isinstance(target, collections.deque):
            target.clear()
            target.extend(items)
        else:
            base: Any = list if isinstance(target, list) else bytearray
            base.__setitem__(target, slice(None), items)


def _put_set(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    for _, items in parts:
        set.clear(target)
        set.update(target, items)


def _put_closure(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
    for name, value in parts:
        if not _is_same(content_of(cells[name]), value):
            cells[name].cell_contents = value


def _put_attributes(target: Any, kind: Any, whole: bool, parts: list[Any], kept: set[Any]) -> None:
    if kind is not None and type(target) is not kind:
        target.__class__ = kind
    own = vars(target) if hasattr(target, "__dict__") else {}
    if (
        not whole
        and not own.keys() >= {key for key, _ in parts}
        and hasattr(target, "__setstate__")
    ):
        target.__setstate__(dict(parts))
        return
    for key in [key for key in own if whole and key not in kept and key not in dict(parts)]:
        del own[key]
    _put_names(own, parts)


def _put_slots(target: Any, _kind: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    for name, value in parts:
        object.__setattr__(target, name, value)


def _put_class(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    for name, value in parts:
        if not _is_same(vars(target).get(name, MISSING), value):
            setattr(target, name, value)


def _put_globals(target: Any, _about: Any, _whole: bool, parts: list[Any], _kept: set[Any]) -> None:
    _put_names(target.__globals__, parts)


def _put_names(names: dict[str, Any], parts: Sequence[tuple[str, Any]]) -> None:
    for name, value in parts:
        if not _is_same(names.get(name, MISSING), value):
            names[name] = value


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (
        type(before) is type(now) and isinstance(now, NUMBERS) and before == now
    )


_PUT: dict[str, Callable[[Any, Any, bool, list[Any], set[Any]], None]] = {
    "tensor": _put_tensor,
    "array": _put_array,
    "dict": _put_dict,
    "list": _put_list,
    "set": _put_set,
    "closure": _put_closure,
    "attributes": _put_attributes,
    "slots": _put_slots,
    "class": _put_class,
    "names": _put_globals,
}
