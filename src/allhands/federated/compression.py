"""Compression of updates on their way to the server: what a client sends is narrowed, and its bytes are counted.

The simulation computes what the server would have received; nothing is packed. Every client's update is a row of numbers; scales
are one a tensor. With `feedback`, a client keeps what was lost and adds it to its next update (Seide et al., 1-Bit Stochastic
Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated.algorithms.base import Server
from allhands.federated.layout import Layout
from allhands.federated.noise import hashed


class Compression(ABC):
    """One way of narrowing updates.

    Args:
        feedback: keep what was lost, and add it to the client's next update.
    """

    #: The name by which it is chosen.
    name: str

    def __init__(self, feedback: bool = False) -> None:
        if not isinstance(feedback, bool):
            raise UserError(f"feedback={feedback!r}; it must be true or false")
        self.feedback = feedback

    def narrow(self, updates: torch.Tensor, residuals: torch.Tensor | None, clients: Sequence[int], server: Server) -> float:
        """Replace updates, shape ``[clients, length]``, in place by what the server receives; returns the bytes of each.

        Args:
            updates: what clients have learnt.
            residuals: what each has kept back before, same shape; replaced in place. None without `feedback`.
            clients: who they are, for random roundings.
            server: the round and the layout.
        """
        if residuals is None:
            return self._narrow(updates, clients, server)
        updates += residuals
        residuals.copy_(updates)
        sent = self._narrow(updates, clients, server)
        residuals -= updates
        return sent

    @abstractmethod
    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> float:
        """The narrowing alone."""


class TopK(Compression):
    """The largest numbers of an update, with their places; the others count as 0 (Aji and Heafield, Sparse Communication for
    Distributed Gradient Descent, EMNLP 2017).

    Args:
        fraction: how many of all numbers, above 0 and at most 1; at least one is sent.
        feedback: see `Compression`.
    """

    name = "topk"

    def __init__(self, fraction: float = 0.01, feedback: bool = False) -> None:
        super().__init__(feedback)
        if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise UserError(f"fraction={fraction!r}; it must be above 0 and at most 1, such as 0.01 for one number in a hundred")
        self.fraction = float(fraction)

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> float:
        count = max(1, round(self.fraction * numbers(server.layout)))
        largest = updates.abs().topk(min(count, updates.shape[1]), dim=1).indices
        kept = torch.zeros_like(updates).scatter_(1, largest, updates.gather(1, largest))
        updates.copy_(kept)
        return float(count * (updates.element_size() + 4))


class EightBit(Compression):
    """Integers from -127 to 127 and one scale a tensor, rounded at random so that the mean is right (Alistarh et al., QSGD,
    NeurIPS 2017).

    Args:
        stochastic: round at random; False rounds to the nearest.
        feedback: see `Compression`.
    """

    name = "8bit"

    def __init__(self, stochastic: bool = True, feedback: bool = False) -> None:
        super().__init__(feedback)
        self.stochastic = stochastic

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> float:
        if self.stochastic:
            keys = [derive_seed(server.seed, "rounding", server.round, client) & 0x7FFFFFFF for client in clients]
            bits = hashed(updates.shape[1], torch.tensor(keys, dtype=torch.int32, device=updates.device)[:, None])
            chance = bits.to(updates.dtype).add_(2.0**31).mul_(2.0**-32)
        for place in server.layout.places:
            part = updates[:, place.start : place.stop]
            scale = part.abs().amax(1, keepdim=True).div_(127)
            steps = part / torch.where(scale > 0, scale, 1.0)
            steps = (steps + chance[:, place.start : place.stop]).floor_() if self.stochastic else steps.round_()
            part.copy_(steps.clamp_(-127, 127).mul_(scale))
        return float(numbers(server.layout) + 4 * len(server.layout.places))


class OneBit(Compression):
    """The sign of every number, and one scale a tensor: the mean of the absolute values (Bernstein et al., signSGD, ICML 2018;
    with `feedback`, Karimireddy et al., ICML 2019).

    Args:
        feedback: see `Compression`; without it, what is lost is lost.
    """

    name = "1bit"

    def __init__(self, feedback: bool = True) -> None:
        super().__init__(feedback)

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> float:
        for place in server.layout.places:
            part = updates[:, place.start : place.stop]
            scale = part.abs().mean(1, keepdim=True)
            part.copy_(torch.where(part >= 0, scale, -scale))
        return float(-(-numbers(server.layout) // 8) + 4 * len(server.layout.places))


COMPRESSIONS: dict[str, type[Compression]] = {cls.name: cls for cls in (TopK, EightBit, OneBit)}


def numbers(layout: Layout) -> int:
    """Numbers of a model that travel, without the gaps of a row."""
    return sum(place.stop - place.start for place in layout.places)


def plain_bytes(server: Server) -> float:
    """Bytes of a whole model: its numbers as they are, and 8 for each number of integer buffers."""
    return float(numbers(server.layout) * server.weights.element_size() + 8 * len(server.integers))
