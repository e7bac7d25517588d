"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020."""

from __future__ import annotations

from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.base import START_GRADIENT, Algorithm, Server, Trained, fraction
from allhands.federated.algorithms.fednova import gradient_weight, sgd_options
from allhands.federated.sums import Sums


class Scaffold(Algorithm):
    """Clients correct their gradients by how they differ from everyone's: ``gradient - own control
    + server's control`` (algorithm 1 of the paper).

    After its steps a client's control becomes, by option II, ``own - server's + (start - weights) /
    (lr * steps)``, its mean gradient on the way, which needs SGD; by option I the gradient of its
    mean loss at the model that it was given, which costs one further pass over its data and any
    optimizer will do. The server's is the mean over all clients, those that have not trained yet
    with 0. Clients send twice the numbers of FedAvg and keep one vector each.

    The gradient of option I is that of the model as it is measured: without dropout, BatchNorm with
    its statistics as they are, and before any clipping. It is taken in batches of the size of a
    step, each weighted by its samples.

    Args:
        server_lr: the server's step along the mean update.
        weighted: clients count by samples in both means, which makes the mean of all samples'
            losses the objective; False: every client counts the same, as in the paper.
        momentum: of option II: with momentum in the clients' SGD more gradient is in an update than
            the number of steps says. "counted" divides by what is in it, so that a control is a
            mean of gradients; "ignored" divides by the steps, as the formula (and published results
            of others) has it.
        average_buffers: average BatchNorm's statistics as the update; without, a model that has
            some is refused.
        option: "II" or "I", how a client finds its control.
    """

    name = "scaffold"
    corrects = True

    def __init__(
        self,
        server_lr: float = 1.0,
        weighted: bool = False,
        momentum: str = "counted",
        average_buffers: bool = False,
        option: str = "II",
    ) -> None:
        self.server_lr = fraction("server_lr", server_lr, open_low=True)
        self.weighted, self.average_buffers = weighted, average_buffers
        if momentum not in ("counted", "ignored"):
            raise UserError(f"momentum={momentum!r}; it must be 'counted' or 'ignored'")
        if option not in ("I", "II"):
            raise UserError(f"option={option!r}; it must be 'I' or 'II', as in the paper")
        if option == "I" and momentum != "counted":
            raise UserError(
                f"momentum={momentum!r} with option='I', whose controls do not come from updates; "
                "leave it out"
            )
        self.momentum, self.option, self.needs_start_gradient = momentum, option, option == "I"

    def check(self, server: Server, per_round: int) -> None:
        if self.option == "I":
            return
        if any(
            options["lr"] == 0 or options["maximize"] for options in sgd_options(self.name, server)
        ):
            raise UserError(
                "algorithm='scaffold' divides by the clients' learning rate and descends; give "
                "every group of SGD a learning rate above 0, and no maximize"
            )

    def begin(self, server: Server) -> None:
        self.control = torch.zeros(server.layout.trained, dtype=torch.float64, device=server.device)
        # What clients subtract; in their own type, and never another tensor.
        self._used = torch.zeros(
            server.layout.trained, dtype=server.layout.dtype, device=server.device
        )

    def client_state(self, server: Server) -> dict[str, int]:
        return {"control": server.layout.trained}

    def vectors(self, server: Server) -> dict[str, int]:
        return {"update": server.layout.length, "control": server.layout.trained}

    def beside_model(self, server: Server) -> tuple[int, int]:
        return server.layout.trained, server.layout.trained

    def beside(self, server: Server) -> dict[str, torch.Tensor]:
        return {"control": self._used}

    def correct(
        self,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        own: dict[str, torch.Tensor],
    ) -> None:
        gradients.add_(self._used).sub_(own["control"])

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        updates, before = trained.updates, trained.own["control"]
        if self.option == "II":
            change = self._mean_gradient(updates, trained, server)
        else:
            change = self._start_gradient(trained, server)
        change -= before if self.option == "I" else self._used
        before += change
        weights = trained.samples if self.weighted else torch.full_like(trained.samples, sums.share)
        sums.add("update", updates, weights)
        sums.add("control", change, weights)

    def _start_gradient(self, trained: Trained, server: Server) -> torch.Tensor:
        """At the model that clients began with: shape ``[clients, trained]``, a new tensor."""
        gradients = trained.own[START_GRADIENT].clone()
        # Clients' own layers have nothing in common to be corrected towards.
        if server.own is not None:
            gradients[:, server.own[server.own < server.layout.trained]] = 0.0
        return gradients

    def _mean_gradient(
        self, updates: torch.Tensor, trained: Trained, server: Server
    ) -> torch.Tensor:
        """On the way, with what has corrected it: shape ``[clients, trained]``."""
        made = torch.empty_like(updates[:, : server.layout.trained])
        steps = trained.steps.tolist()
        for (begin, end), options in zip(
            server.layout.groups, sgd_options(self.name, server), strict=True
        ):
            applied = [
                gradient_weight(int(n), options) if self.momentum == "counted" else n for n in steps
            ]
            divisors = torch.tensor(
                [-options["lr"] * n for n in applied], dtype=made.dtype, device=made.device
            )
            torch.div(updates[:, begin:end], divisors[:, None], out=made[:, begin:end])
        return made

    def aggregate(self, server: Server, sums: Sums) -> None:
        update, change = sums.mean("update"), sums.total("control")
        update[: server.layout.trained] *= self.server_lr
        server.weights.add_(update)
        # The cohort's part in the mean over all clients: its own weights over those of everyone.
        everyone = server.num_samples if self.weighted else server.num_clients * sums.share
        self.control += change / (everyone * sums.scale)
        self._used.copy_(self.control)

    def state_dict(self) -> dict[str, Any]:
        return {"control": self.control}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.control.copy_(state["control"])
        self._used.copy_(self.control)
