"""Which gradients travel together, and the memory in which they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allhands.comm.flat_layout import FlatLayout
from allhands.horovod import engine
from allhands.horovod.handles import Handle
from allhands.horovod.operation_request import OperationRequest
from allhands.horovod.torch.pending import AsyncResult

# As torch's DistributedDataParallel has them: the first one is small, so that it leaves early.
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20


class Flat:
    """Memory for some gradients, one after another, and a view of each; behind them a mark for
    each, 1 where it is there."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self._layout = FlatLayout({str(number): param for number, param in enumerate(params)})
        self.length = self._layout.length
        self.marked = torch.empty(
            self.length + len(params), dtype=params[0].dtype, device=params[0].device
        )
        self.whole, self.marks = self.marked[: self.length], self.marked[self.length :]
        self.all_there = torch.ones_like(self.marks)
        self.cut = self._layout.views
        self.views = self.cut(self.whole)
        self._sorts = [(param.shape, param.dtype) for param in params]

    def fits(self) -> bool:
        """Whether the parameters still have the shapes and dtypes that it was made for."""
        return [(param.shape, param.dtype) for param in self.params] == self._sorts


@dataclass
class OptimizerBucket:
    """Parameters of one dtype and device whose gradients travel together."""

    name: str
    params: list[torch.nn.Parameter]
    # Backward passes of this step that each has yet to see.
    left: list[int] = field(default_factory=list)
    waiting: int = 0  # how many have one left
    sent: bool = False
    handle: Handle | None = None
    packed: bool = False  # for a round
    ready: Any = None  # a torch.cuda.Event behind that, where it was too early to leave
    flat: Flat | None = None  # of what was sent
    absent: list[int] = field(default_factory=list)  # places of parameters without a gradient here
    narrow: torch.Tensor | None = None  # what travels, and what the flat memory is made of it with
    context: Any = None
    sparse: list[tuple[torch.nn.Parameter, AsyncResult]] = field(default_factory=list)
    made_dense: bool = False  # a sparse gradient was
    # Of the usual case, in which all gradients are there and dense: made once.
    usual: Flat | None = None
    usual_ask: OperationRequest | None = None

    @property
    def was_usual(self) -> bool:
        """What was sent was that."""
        return (
            self.flat is not None
            and self.flat is self.usual
            and not (self.absent or self.sparse or self.made_dense)
        )

    def renew(self, passes: int) -> None:
        """Begin a new step."""
        self.left, self.waiting = [passes] * len(self.params), len(self.params)
        self.sent, self.handle, self.flat, self.narrow = False, None, None, None
        self.packed, self.ready = False, None
        self.absent, self.sparse, self.made_dense = [], [], False


def grouped(
    params: list[torch.nn.Parameter], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.nn.Parameter]]:
    """Parameters by bucket, in the reverse of their order; see `Reducer` for `groups`."""
    if isinstance(groups, int):
        count = min(groups, len(params))
        sizes = [len(params) // count + (number < len(params) % count) for number in range(count)]
        rest, made = params[::-1], []
        for size in sizes:
            made.append(rest[:size])
            rest = rest[size:]
        return made
    made = []
    if groups is not None:
        known = set(params)
        made = [[param for param in group if param in known] for group in groups]  # type: ignore[misc]
        taken = {param for group in made for param in group}
        params = [param for param in params if param not in taken]
    buckets: list[list[torch.nn.Parameter]] = []
    held: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    longest = min(_BUCKET, engine.current().settings.fusion_threshold)
    limit = min(_FIRST_BUCKET, longest)
    for param in reversed(params):
        key = (param.dtype, param.device)
        group = held.setdefault(key, [])
        size = sum(other.numel() * other.element_size() for other in group)
        if group and size + param.numel() * param.element_size() > limit:
            buckets.append(held[key])
            held[key] = []
            limit = longest
        held[key].append(param)
    return [group for group in [*made, *buckets, *held.values()] if group]


def of_one_sort(groups: list[list[torch.nn.Parameter]]) -> list[list[torch.nn.Parameter]]:
    """The same, so that each bucket has one dtype and one device."""
    found = []
    for group in groups:
        sorts: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for param in group:
            sorts.setdefault((param.dtype, param.device), []).append(param)
        found += list(sorts.values())
    return found
