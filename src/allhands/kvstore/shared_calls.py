"""The calls of workers that share a store without servers between them: compared before each call
does its work, and made for a worker that has left."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from allhands.errors import UserError

# Calls of others in which a worker that has left the store still takes part, with no samples.
_OUTLIVE = ("update", "reduce", "push", "pull")


class SharedStore(Protocol):
    """A store, as far as the others' calls need it."""

    def idle(self, about: Any) -> bool:
        """Whether an `update` is that of a worker that has no keys."""

    def take_part(self, call: str, about: Any, weights: Sequence[float]) -> None:
        """Do what the others do, with nothing of this worker's own."""


class SharedCalls:
    """What each worker calls. All workers make the same calls in the same order; the words are
    exchanged only where their hashes differ.

    Args:
        who: the workers, for messages: "the workers of a host".
        ranks: theirs, in order.
        place: this worker's index in `ranks`.
        gather: gives the tensors of all workers, which are alike in form, in the order of `ranks`.
        number: of the store, which all have made in the same order.
        stores: all that these workers share, by number.
    """

    def __init__(
        self,
        who: str,
        ranks: Sequence[int],
        place: int,
        gather: Callable[[torch.Tensor], Iterable[torch.Tensor]],
        number: int,
        stores: Mapping[int, SharedStore] | Sequence[SharedStore],
    ) -> None:
        self._who, self._ranks, self._place = who, ranks, place
        self._gather, self._number, self._stores = gather, number, stores
        self._present = len(ranks)

    @property
    def present(self) -> int:
        """How many workers had not left in the last call."""
        return self._present

    def say(self, call: str, about: Any, weight: float = 0.0) -> tuple[list[Any], list[float]]:
        """What each worker calls, as [number, call, about], and its weight."""
        words = json.dumps([self._number, call, about], sort_keys=True).encode()
        digest = hashlib.blake2b(words, digest_size=8).digest()
        head = torch.tensor(struct.unpack("<qqq", digest + struct.pack("<dq", weight, len(words))))
        heads = [one.tolist() for one in self._gather(head)]
        weights = [struct.unpack("<d", struct.pack("<q", bits))[0] for _, bits, _ in heads]
        if len({hashed for hashed, _, _ in heads}) == 1:
            return [[self._number, call, about]] * len(heads), weights
        padded = bytearray(words.ljust(max(length for *_, length in heads)))
        texts = self._gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [json.loads(bytes(text.numpy())) for text in texts], weights

    def follow(self, call: str, about: Any, weight: float = 0.0) -> tuple[Any, list[float]]:
        """What all workers do in this call, and their weights.

        Raises:
            UserError: they do not make the same call.
        """
        said, weights = self.say(call, about, weight)
        own = said[self._place]
        alike = [one for one in said if one[:2] == own[:2] and not self._idle(one)]
        shared = own if not alike or not self._idle(own) else alike[0]
        for rank, one in zip(self._ranks, said, strict=True):
            late = call in _OUTLIVE and (
                one[1] == "close" or (one[:2] == own[:2] and self._idle(one))
            )
            if one != shared and not late:
                raise UserError(
                    f"{self._who} do not make the same calls: worker {self._ranks[self._place]} is "
                    f"in {call_text(own)}, worker {rank} in {call_text(one)}; make the same calls "
                    "in the same order on all of them"
                )
        self._present = sum(one[1] != "close" for one in said)
        return shared[2], weights

    def leave(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Take part in the calls of the others, with no samples, until all leave, or it has
        `ended`.

        Raises:
            UserError: the others make a call in which this worker would be needed.
        """
        while not ended():
            said, weights = self.say("close", None)
            own = said[self._place]
            others = [one for one in said if one != own]
            if not others:
                return
            shared = next((one for one in others if not self._idle(one)), others[0])
            number, call, about = shared
            if call not in _OUTLIVE or any(
                one != shared and not (one[:2] == shared[:2] and self._idle(one)) for one in others
            ):
                calls = " and in ".join(map(call_text, others))
                raise UserError(
                    f"worker {self._ranks[self._place]} has left the store, while others are in "
                    f"{calls}; make the same calls in the same order on all of them"
                )
            self._stores[number].take_part(call, about, weights)

    def _idle(self, said: Sequence[Any]) -> bool:
        number, call, about = said
        return call == "update" and self._stores[number].idle(about)


def call_text(said: Sequence[Any]) -> str:
    """A call, as [number, call, about], in an error message."""
    number, call, about = said
    text = json.dumps(about)
    shown = "" if about is None else f" {text if len(text) <= 200 else text[:199] + '…'}"
    return f"'{call}{shown}'" + (f" of store {number + 1}" if number else "")
