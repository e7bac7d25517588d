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
from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.noise import hashed

#: The name of what was lost, among what a client keeps.
RESIDUAL = "residual"


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

    def narrow(self, updates: torch.Tensor, residuals: torch.Tensor | None, clients: Sequence[int], server: Server) -> None:
        """Replace updates, shape ``[clients, length]``, in place by what the server receives.

        Args:
            updates: what clients have learnt.
            residuals: what each has kept back before, same shape; replaced in place. None without `feedback`.
            clients: who they are, for random roundings.
            server: the round and the layout.
        """
        if residuals is None:
            self._narrow(updates, clients, server)
            return
        updates += residuals
        residuals.copy_(updates)
        self._narrow(updates, clients, server)
        residuals -= updates

    @abstractmethod
    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> None:
        """The narrowing alone."""

    @abstractmethod
    def sent(self, server: Server) -> float:
        """Bytes of one client's update."""


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

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> None:
        largest = updates.abs().topk(self._count(server), dim=1).indices
        kept = torch.zeros_like(updates).scatter_(1, largest, updates.gather(1, largest))
        updates.copy_(kept)

    def _count(self, server: Server) -> int:
        return max(1, round(self.fraction * numbers(server)))

    def sent(self, server: Server) -> float:
        return float(self._count(server) * (server.weights.element_size() + 4))


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

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> None:
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

    def sent(self, server: Server) -> float:
        return float(numbers(server) + 4 * _tensors(server))


class OneBit(Compression):
    """The sign of every number, and one scale a tensor: the mean of the absolute values (Bernstein et al., signSGD, ICML 2018;
    with `feedback`, Karimireddy et al., ICML 2019).

    Args:
        feedback: see `Compression`; without it, what is lost is lost.
    """

    name = "1bit"

    def __init__(self, feedback: bool = True) -> None:
        super().__init__(feedback)

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> None:
        for place in server.layout.places:
            part = updates[:, place.start : place.stop]
            scale = part.abs().mean(1, keepdim=True)
            part.copy_(torch.where(part >= 0, scale, -scale))

    def sent(self, server: Server) -> float:
        return float(-(-numbers(server) // 8) + 4 * _tensors(server))


COMPRESSIONS: dict[str, type[Compression]] = {cls.name: cls for cls in (TopK, EightBit, OneBit)}


def numbers(server: Server) -> int:
    """Numbers of a model that travel, without the gaps of a row and the layers that clients keep as their own."""
    kept = 0 if server.own is None else len(server.own)
    return sum(place.stop - place.start for place in server.layout.places) - kept


def plain_bytes(server: Server) -> float:
    """Bytes of a whole model: its numbers as they are, and 8 for each number of integer buffers."""
    return float(numbers(server) * server.weights.element_size() + 8 * len(server.integers))


def _tensors(server: Server) -> int:
    own = set() if server.own is None else set(server.own.tolist())
    return sum(place.start not in own for place in server.layout.places)


class Traffic:
    """What clients send, and how many bytes go each way.

    Args:
        algorithm: may send more than the update.
        server: the model.
        compression: narrows updates; None leaves them as they are.

    Attributes:
        up, down: bytes that one client sends and gets in a round.

    Raises:
        UserError: the algorithm sends more than the update, or nothing, so that it cannot be narrowed.
    """

    def __init__(self, algorithm: Algorithm, server: Server, compression: Compression | None) -> None:
        self.compression = compression
        gets, sends = algorithm.beside_model(server)
        if compression is not None and (sends or not algorithm.shares):
            raise UserError(f"compression={compression.name!r} narrows updates, and algorithm={algorithm.name!r} sends "
                            f"{'other vectors too' if algorithm.shares else 'none'}; write compression=None")  # fmt: skip
        width = server.weights.element_size()
        shared = 1.0 if algorithm.shares else 0.0
        update = plain_bytes(server) if compression is None else compression.sent(server) + 8 * len(server.integers)
        self.up, self.down = shared * update + width * sends, shared * plain_bytes(server) + width * gets

    def narrow(self, trained: Trained, server: Server) -> None:
        """Let the updates of clients be what the server receives of them."""
        if self.compression is not None:
            updates = trained.updates
            self.compression.narrow(updates, trained.own.get(RESIDUAL), trained.clients, server)
            trained.received = updates
