"""Compression of updates on their way to the server: what a client sends is narrowed, and its bytes
are counted.

The simulation computes what the server would have received; nothing is packed. Every client's
update is a row of numbers; scales are one a tensor. With `feedback`, a client keeps what was lost
and adds it to its next update (Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014;
Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from allhands.checks import check_flag
from allhands.comm.codecs import Cast, Scaled, TopK, codec_from
from allhands.comm.compress import CODECS, NO_MATRICES, NO_THRESHOLD, checked_compress
from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained
from allhands.federated.keyed_noise import hashed

#: The name of what was lost, among what a client keeps.
RESIDUAL = "residual"


class UpdateCompression(ABC):
    """One way of narrowing updates.

    Args:
        feedback: keep what was lost, and add it to the client's next update.
    """

    #: The name by which it is chosen.
    name: str

    def __init__(self, feedback: bool = False) -> None:
        check_flag("feedback", feedback)
        self.feedback = feedback

    def narrow(
        self,
        updates: torch.Tensor,
        residuals: torch.Tensor | None,
        clients: Sequence[int],
        server: Server,
    ) -> None:
        """Replace updates, shape ``[clients, length]``, in place by what the server receives.

        Args:
            updates: what clients have learnt.
            residuals: what each has kept back before, same shape; replaced in place. None without
                `feedback`.
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


class Coded(UpdateCompression):
    """Updates in one of the codecs of `allhands.comm.codecs`; int8 and 1bit have one scale a
    tensor.

    Args:
        compress: a name, or ``{"name": …, option: …}``. Besides the codec's own options there are
            "feedback" (see `UpdateCompression`; true for 1bit, and false for the others), and for
            int8 "stochastic": round at random, so that the mean is right (QSGD, NeurIPS 2017), or
            to the nearest.

    Attributes:
        options: of the codec, by name.
    """

    def __init__(self, compress: str | dict[str, Any]) -> None:
        more = {name: {"feedback": name == "1bit"} for name in CODECS}
        more["int8"]["stochastic"] = True
        given = checked_compress(
            compress, "Federated(compress=", {"powersgd": NO_MATRICES, "2bit": NO_THRESHOLD}, more
        )
        assert given is not None
        super().__init__(given["feedback"])
        self.name = given["name"]
        self.options = {option: value for option, value in given.items() if option != "name"}
        self._codec = codec_from(given, block=None)
        self._stochastic = self.options.get("stochastic", False)
        check_flag("stochastic", self._stochastic)

    def _narrow(self, updates: torch.Tensor, clients: Sequence[int], server: Server) -> None:
        codec = self._codec
        if isinstance(codec, TopK):  # of the whole update, not of each tensor
            largest = updates.abs().topk(codec.count(numbers(server)), dim=1).indices
            updates.copy_(
                torch.zeros_like(updates).scatter_(1, largest, updates.gather(1, largest))
            )
        elif isinstance(codec, Scaled):
            chance = self._chance(updates, clients, server) if self._stochastic else None
            for place in server.layout.places:
                part = slice(place.start, place.stop)
                drawn = None if chance is None else chance[:, part]
                updates[:, part] = codec.arrives(updates[:, part], drawn)
        elif isinstance(codec, Cast):
            updates.copy_(codec.arrives(updates))

    def _chance(
        self, updates: torch.Tensor, clients: Sequence[int], server: Server
    ) -> torch.Tensor:
        """A number from 0 to below 1 for each of the updates, which depends on the round and the
        client alone."""
        keys = [
            derive_seed(server.seed, "rounding", server.round, client) & 0x7FFFFFFF
            for client in clients
        ]
        bits = hashed(
            updates.shape[1], torch.tensor(keys, dtype=torch.int32, device=updates.device)[:, None]
        )
        return bits.to(updates.dtype).add_(2.0**31).mul_(2.0**-32)

    def sent(self, server: Server) -> float:
        if isinstance(self._codec, TopK):
            return float(self._codec.count(numbers(server)) * (server.weights.element_size() + 4))
        own = set() if server.own is None else set(server.own.tolist())
        return float(
            sum(
                self._codec.nbytes(place.stop - place.start)
                for place in server.layout.places
                if place.start not in own
            )
        )


def chosen(compress: Any) -> UpdateCompression | None:
    """What ``compress=`` says: an `UpdateCompression` as it is, a codec's name or options as
    `Coded`; None for None."""
    return (
        compress if compress is None or isinstance(compress, UpdateCompression) else Coded(compress)
    )


def numbers(server: Server) -> int:
    """Numbers of a model that travel, without the gaps of a row and the layers that clients keep as
    their own."""
    kept = 0 if server.own is None else len(server.own)
    return sum(place.stop - place.start for place in server.layout.places) - kept


def plain_bytes(server: Server) -> float:
    """Bytes of a whole model: its numbers as they are, and 8 for each number of integer buffers."""
    return float(numbers(server) * server.weights.element_size() + 8 * len(server.integers))


class Traffic:
    """What clients send, and how many bytes go each way.

    Args:
        algorithm: may send more than the update.
        server: the model.
        compression: narrows updates; None leaves them as they are.

    Attributes:
        up, down: bytes that one client sends and gets in a round.

    Raises:
        UserError: the algorithm sends more than the update, or nothing, so that it cannot be
            narrowed.
    """

    def __init__(
        self, algorithm: Algorithm, server: Server, compression: UpdateCompression | None
    ) -> None:
        self.compression = compression
        gets, sends = algorithm.beside_model(server)
        if compression is not None and (sends or not algorithm.shares):
            raise UserError(
                f"compress={compression.name!r} narrows updates, and algorithm={algorithm.name!r} "
                f"sends {'other vectors too' if algorithm.shares else 'none'}; write compress=None"
            )
        width = server.weights.element_size()
        shared = 1.0 if algorithm.shares else 0.0
        if compression is None:
            update = plain_bytes(server)
        else:
            update = compression.sent(server) + 8 * len(server.integers)
        self.up = shared * update + width * sends
        self.down = shared * plain_bytes(server) + width * gets

    def narrow(self, trained: Trained, server: Server) -> None:
        """Let the updates of clients be what the server receives of them."""
        if self.compression is not None:
            updates = trained.updates
            self.compression.narrow(updates, trained.own.get(RESIDUAL), trained.clients, server)
            trained.received = updates
