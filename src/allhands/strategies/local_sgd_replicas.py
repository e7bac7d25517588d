"""The logical workers of `local_sgd` in a job whose members may change.

How many workers take steps of their own between two exchanges is part of what is computed. So the
workers with which the job began stay, as replicas, and those processes that are left each train
one or several of them. Each replica is on two processes: one trains it, and the next one has a copy
of it as of the last exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from allhands.comm import all_gather_text, broadcast_ints, broadcast_tensors, calls
from allhands.data.order import share_of
from allhands.data.random import preserved_generators
from allhands.errors import WorldError
from allhands.strategies.alike import statistics_and_others
from allhands.strategies.local_sgd_fragments import Fragment
from allhands.strategies.optimizer_means import State, own_state, take_own_state
from allhands.strategies.own_weights import OwnWeights

Tensors = dict[str, torch.Tensor]


@dataclass
class Replica:
    """What one logical worker has, while its weights are not in the model.

    Attributes:
        weights: one vector.
        buffers: in the model's order.
        optimizer: its state.
        seen: samples since the last exchange.
    """

    weights: torch.Tensor
    buffers: list[torch.Tensor]
    optimizer: State
    seen: float


@dataclass
class _Copy:
    """Of replicas at one step, and of what they share then; as tensors by name."""

    own: dict[int, Tensors] = field(default_factory=dict)
    others: dict[int, Tensors] = field(default_factory=dict)
    anchor: torch.Tensor | None = None
    momentum: torch.Tensor | None = None
    alike: bool = True


#: Takes a step of a replica again: its number.
Again = Callable[[int], None]


class LocalReplicas:
    """The replicas of one model.

    Args:
        own: the model, the optimizer, and the weights of the last exchange.
        count: how many there are.

    Attributes:
        held: those of this rank, by number.
        end_step: to be called once all of this rank's have taken their step: exchanges what is due.
        is_dirty: a step was begun, or buffers were changed, in what all ranks do together.
    """

    def __init__(self, own: OwnWeights, count: int) -> None:
        self.own, self.count = own, count
        self.end_step: Callable[[], None] = lambda: None
        self.held: dict[int, Replica] = {}
        self.begun = self.is_dirty = False
        #: The one whose weights are in the model, where they are not put aside.
        self._active: int | None = None
        self._copy = _Copy()
        self._next_copy: _Copy | None = None
        # Steps since `_copy`, and the one that is being taken.
        self._since: list[Again] = []
        self._taking: Again | None = None
        # Weights, and the optimizer's state, were put aside as the unit began.
        self._settled = [0, 0]

    @property
    def _part(self) -> Fragment:
        return self.own.parts[0]

    def mine(self) -> range:
        """The numbers of the replicas that this rank is to train."""
        world = self.own.world
        return range(*share_of(self.count, world.rank, world.world_size))

    @property
    def most(self) -> int:
        """How many a rank trains, at most."""
        return -(-self.count // self.own.world.world_size)

    # ------------------------------------------------------------------ in the model and at rest

    def begin(self, alike: bool) -> None:
        """The training begins: the model holds what all replicas begin with, or where they are not
        `alike`, this rank's own."""
        self.begun = True
        for number in self.mine():
            self.held[number] = self._read()
        self._active = min(self.held, default=None)
        own = self.own
        if self._active is not None:
            replica = self.held[self._active]
            # Of a checkpoint: what this worker goes on with is not in the model.
            (aside,) = own.aside or [None]
            replica.weights = replica.weights if aside is None else aside.clone()
            if own.optimizer_state is None:
                own.optimizer.state = replica.optimizer
            else:
                replica.optimizer = own.optimizer_state
        self._copy = self._taken()
        size = own.world.world_size
        if alike and size > 1:  # the copies that the rank before would send
            for number in range(*share_of(self.count, (own.world.rank - 1) % size, size)):
                self._copy.others[number] = self._to_tensors(self._read())

    def _read(self) -> Replica:
        own = self.own
        state = take_own_state(
            {k: v.clone() for k, v in own_state(own.optimizer.state, own.optimizer).items()},
            own.optimizer,
        )
        buffers = [buffer.clone() for buffer in own.model.buffers()]
        return Replica(self._part.read(), buffers, state, self._part.seen)

    def stash(self) -> None:
        number, self._active = self._active, None
        if number is None or self.own.aside is not None:
            return
        own, replica = self.own, self.held[number]
        replica.weights, replica.seen = self._part.read(), self._part.seen
        for kept, buffer in zip(replica.buffers, own.model.buffers(), strict=True):
            kept.copy_(buffer)
        if own.optimizer_state is None:
            replica.optimizer = own.optimizer.state

    def activate(self, number: int) -> None:
        """Put a replica into the model."""
        if self._active == number:
            return
        self.stash()
        own, replica = self.own, self.held[number]
        self._part.write(replica.weights)
        self._part.seen = replica.seen
        with torch.no_grad():
            for kept, buffer in zip(replica.buffers, own.model.buffers(), strict=True):
                buffer.copy_(kept)
        own.optimizer.state = replica.optimizer
        self._active = number

    # ------------------------------------------------------------------ a step

    def begin_unit(self) -> None:
        """What all ranks do together begins."""
        own = self.own
        self._settled = [own.aside is not None, own.optimizer_state is not None]

    def take(
        self, take: Callable[..., None], parts: Sequence[Any], total: int, again: Again
    ) -> None:
        """Take the own steps of this rank's replicas.

        Args:
            take: takes one with micro-batches, their counts, the global batch and a flag.
            parts: the arguments for each replica.
            total: samples of the global batch.
            again: takes the step again.
        """
        self.is_dirty, self._taking = True, again
        for number, part in zip(sorted(self.held), parts, strict=True):
            self.activate(number)
            take(*part)
        # As many calls as on the other ranks, which may ask one another in some of them.
        for _ in range(self.most - len(parts)):
            take([], [], total, False)
        if self.held:
            self.activate(min(self.held))

    def deltas(self) -> tuple[torch.Tensor, float]:
        """The mean change of this rank's replicas since the last exchange, and the samples."""
        self._refresh()
        anchor = self._part.anchor
        total, samples = torch.zeros_like(anchor), 0.0
        for replica in self.held.values():
            total += (anchor - replica.weights) * replica.seen
            samples += replica.seen
        return (total / samples if samples else total), samples

    def _refresh(self) -> None:
        """Let what is at rest be as it is in the model."""
        number = self._active
        if number is not None:
            self.stash()
            self._active = number

    def exchanged(self) -> None:
        """All begin anew at the weights of the exchange."""
        part = self._part
        for replica in self.held.values():
            replica.weights, replica.seen = part.anchor.clone(), 0.0
        part.write(part.anchor)
        part.seen = 0.0

    def add_copies(self) -> None:
        """Give the next rank a copy of this one's replicas; all ranks call it together. It counts
        once `commit` says so."""
        self._refresh()
        made, world = self._taken(), self.own.world
        size = world.world_size
        if size > 1:
            calls.note("copies of workers' optimizers for the next worker")
            moves = [
                (number, rank, (rank + 1) % size)
                for rank in range(size)
                for number in range(*share_of(self.count, rank, size))
            ]
            made.others = self._move(moves, made.own)
        self._next_copy = made

    def commit(self) -> None:
        """What all ranks did together is done."""
        if self._next_copy is not None:
            self._copy, self._next_copy = self._next_copy, None
            self._since.clear()
        elif self._taking is not None:
            self._since.append(self._taking)
        self.is_dirty, self._taking = False, None

    def synced(self) -> None:
        """The buffers in the model are those of all replicas now; all ranks call it together."""
        self.is_dirty = True
        for replica in self.held.values():
            for kept, buffer in zip(replica.buffers, self.own.model.buffers(), strict=True):
                kept.copy_(buffer)
        self.add_copies()

    def mean_of_statistics(self) -> None:
        """Let the running statistics in the model be such that their mean over the ranks is that
        over the replicas."""
        self._refresh()
        averaged = {id(one) for one in statistics_and_others(self.own.model)[0]}
        scale = self.own.world.world_size / self.count
        for index, buffer in enumerate(self.own.model.buffers()):
            if id(buffer) in averaged:
                mean = torch.zeros_like(buffer)
                for replica in self.held.values():
                    mean += replica.buffers[index]
                buffer.copy_(mean * scale)

    def states(self) -> list[State]:
        """The optimizer's state of each replica."""
        self._refresh()
        return [self.held[number].optimizer for number in sorted(self.held)]

    # ------------------------------------------------------------------ other members

    def lose(self, done: bool) -> None:
        """Members have changed: put what this rank holds into order, without a word to others.

        Args:
            done: another rank has done what this one was doing.
        """
        if done:
            self._refresh()
            self.commit()
        elif self.is_dirty:
            self._active = self._next_copy = self._taking = None
            self.own.aside = None
            part, copy = self._part, self._copy
            assert copy.anchor is not None
            part.anchor = copy.anchor.clone()
            part.momentum = None if copy.momentum is None else copy.momentum.clone()
            part.alike = copy.alike and not self._since
            self.held = {n: self._from_tensors(given) for n, given in copy.own.items()}
            for number in self.held:
                self._repeat(number)
            self.is_dirty = False
        self.stash()
        self.own.aside, self.own.optimizer_state = None, None

    def _repeat(self, number: int) -> None:
        """Take the steps of a replica again that came after its copy."""
        self.activate(number)
        with preserved_generators():
            for again in self._since:
                again(number)
        self.stash()

    def deal(self, source: int) -> list[int]:
        """Bring every replica to the rank that is to train it; all ranks call it together.

        Args:
            source: a rank that has trained before.

        Returns:
            Whether rank `source` had put its weights aside, and the optimizer's state.

        Raises:
            WorldError: the two ranks that had a replica are gone.
        """
        world = self.own.world
        calls.note("dealing out the workers of local_sgd")
        part = self._part
        given = [*self._settled, part.alike, part.momentum is not None]
        *settled, alike, moves_on = broadcast_ints(
            given if world.rank == source else None, world, source
        )
        part.alike = bool(alike)
        if not moves_on:
            part.momentum = None
        elif part.momentum is None:
            part.momentum = torch.zeros_like(part.anchor)
        shared = [part.anchor] if part.momentum is None else [part.anchor, part.momentum]
        broadcast_tensors(shared, world, source)
        told = [
            json.loads(text)
            for text in all_gather_text(
                json.dumps([sorted(self.held), sorted(self._copy.others)]), world
            )
        ]
        moves = []
        for number in range(self.count):
            there = [rank for rank, (held, _) in enumerate(told) if number in held]
            copies = [rank for rank, (_, copies) in enumerate(told) if number in copies]
            if not there and not copies:
                raise WorldError(
                    f"worker {number} of local_sgd was lost, and with it the one that has a copy "
                    "of its optimizer's state. Write --max-restarts, and logdir= and "
                    "resume='auto', so that all workers start again from the newest checkpoint"
                )
            origin = (there or copies)[0]
            if not there and origin == world.rank:
                self.held[number] = self._from_tensors(self._copy.others[number])
                self._repeat(number)
            target = next(
                rank
                for rank in range(world.world_size)
                if number in range(*share_of(self.count, rank, world.world_size))
            )
            if origin != target:
                moves.append((number, origin, target))
        sent = {
            number: self._to_tensors(self.held[number])
            for number, origin, _ in moves
            if origin == world.rank
        }
        found = self._move(moves, sent)
        self.held |= {number: self._from_tensors(one) for number, one in found.items()}
        self.held = {number: self.held[number] for number in self.mine()}
        self.add_copies()
        self.commit()
        self.begun = True
        if self.held:
            self.activate(min(self.held))
        return settled

    # ------------------------------------------------------------------ as tensors

    def _taken(self) -> _Copy:
        """A copy of this rank's replicas as they are at rest."""
        part = self._part
        return _Copy(
            {number: self._to_tensors(one) for number, one in self.held.items()},
            {},
            part.anchor.clone(),
            None if part.momentum is None else part.momentum.clone(),
            part.alike,
        )

    def _to_tensors(self, replica: Replica) -> Tensors:
        found = {f"buffers/{n}": one.clone() for n, one in enumerate(replica.buffers)}
        found["weights"] = replica.weights.clone()
        found["seen"] = torch.tensor(replica.seen, dtype=torch.float64)
        state = own_state(replica.optimizer, self.own.optimizer)
        return found | {name: one.clone() for name, one in state.items()}

    def _from_tensors(self, given: Tensors) -> Replica:
        buffers = [given[f"buffers/{n}"].clone() for n in range(self._buffers)]
        state = take_own_state(given, self.own.optimizer)
        return Replica(given["weights"].clone(), buffers, state, float(given["seen"]))

    @property
    def _buffers(self) -> int:
        return sum(1 for _ in self.own.model.buffers())

    def _move(
        self, moves: Sequence[tuple[int, int, int]], given: dict[int, Tensors]
    ) -> dict[int, Tensors]:
        """Send replicas from rank to rank; those that have come. All ranks call it together."""
        world = self.own.world
        mine = {
            str(number): {
                name: [list(one.shape), str(one.dtype).removeprefix("torch.")]
                for name, one in given[number].items()
            }
            for number, source, _ in moves
            if source == world.rank
        }
        forms: dict[str, Any] = {}
        for text in all_gather_text(json.dumps(mine), world):
            forms |= json.loads(text)
        operations, found = [], {}
        for number, source, target in moves:
            if world.rank not in (source, target) or source == target:
                continue
            if world.rank == source:
                message = _packed(given[number].values(), world.device)
                operations.append(dist.P2POp(dist.isend, message, target))
                self.own.count_copies(message.nbytes)
            else:
                size = sum(_nbytes(form) for form in forms[str(number)].values())
                message = torch.empty(size, dtype=torch.uint8, device=world.device)
                found[number] = message
                operations.append(dist.P2POp(dist.irecv, message, source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return {number: _unpacked(message, forms[str(number)]) for number, message in found.items()}


def _nbytes(form: tuple[list[int], str]) -> int:
    return torch.empty(form[0], dtype=getattr(torch, form[1]), device="meta").nbytes


def _packed(tensors: Any, device: torch.device) -> torch.Tensor:
    parts = [one.contiguous().reshape(-1).view(torch.uint8).to(device) for one in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpacked(message: torch.Tensor, forms: dict[str, Any]) -> Tensors:
    found, begins = {}, 0
    for name, (shape, dtype) in forms.items():
        size = _nbytes((shape, dtype))
        part = message[begins : begins + size].clone()
        found[name] = part.view(getattr(torch, dtype)).reshape(shape)
        begins += size
    return found
