"""q-FedAvg: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020."""

from __future__ import annotations

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.sums import Sums

_SMALLEST = 1e-10  # a loss of 0 has no power below 0


class QFedAvg(Algorithm):
    """Clients count the more, the worse the global model fits their data: the objective is the mean
    of ``loss ** (q + 1)`` (algorithm 2 of the paper).

    With ``F`` a client's loss under the model that it was given, and ``L`` the Lipschitz constant::

        weights += (sum of F**q * L * update) / (sum of q * F**(q - 1) * ||L * update||**2 + L *
        F**q)

    The sums are over the cohort, every client alike, as in the paper; with q = 0 this is FedAvg
    with ``weighted=False``. Losses must not be negative. One further pass over each client's data.

    Args:
        q: at least 0; the larger, the more even the clients' losses.
        lipschitz: of the gradient, above 0; None: 1 / learning rate of the clients, as the paper
            estimates it.
        average_buffers: average BatchNorm's statistics, every client alike; without, a model that
            has some is refused.
    """

    name = "qfedavg"
    needs_start_loss = True

    def __init__(
        self, q: float = 1.0, lipschitz: float | None = None, average_buffers: bool = False
    ) -> None:
        self.q = fraction("q", q)
        self.lipschitz = (
            None if lipschitz is None else fraction("lipschitz", lipschitz, open_low=True)
        )
        self.average_buffers = average_buffers

    def vectors(self, server: Server) -> dict[str, int]:
        trained = server.layout.trained
        return {"update": trained, "buffers": server.layout.length - trained}

    def figures(self) -> tuple[str, ...]:
        return ("h", "start_loss")

    def check(self, server: Server, per_round: int) -> None:
        assert server.local is not None
        rates = [options.get("lr", 0.0) for options in server.local.optimizer.options]
        if self.lipschitz is None and not all(float(rate) > 0 for rate in rates):
            raise UserError(
                "algorithm='qfedavg' takes the Lipschitz constant from the clients' learning rate, "
                "which is 0 or unknown; set lipschitz=…"
            )

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        assert trained.start_loss is not None
        bound = self._lipschitz(server)
        losses = trained.start_loss.to(torch.float64).clamp_min(_SMALLEST)
        updates = trained.updates.to(torch.float64)
        numbers = server.layout.trained
        squares = updates[:, :numbers].square().sum(1).mul(bound * bound)
        share = torch.full_like(losses, sums.share)
        sums.add("update", updates[:, :numbers], losses**self.q * share)
        sums.add("buffers", updates[:, numbers:], share)
        sums.note(
            trained.slots,
            h=self.q * losses ** (self.q - 1) * squares + bound * losses**self.q,
            start_loss=trained.start_loss,
        )

    def aggregate(self, server: Server, sums: Sums) -> None:
        figures, numbers = sums.figures(), server.layout.trained
        there = figures["ok"] > 0
        if float(figures["start_loss"][there].min()) < 0:
            raise UserError(
                "algorithm='qfedavg': a client's loss is negative, and its power is not defined; "
                "use a loss of at least 0"
            )
        slots = len(there)
        scale = self._lipschitz(server) * slots / float(figures["h"][there].sum())
        server.weights[:numbers].add_(sums.total("update") * scale)
        server.weights[numbers:].add_(sums.mean("buffers"))

    def _lipschitz(self, server: Server) -> float:
        return 1.0 / server.learning_rate if self.lipschitz is None else self.lipschitz
