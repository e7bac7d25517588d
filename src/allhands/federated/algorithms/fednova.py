"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020."""

from __future__ import annotations

from functools import lru_cache

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.sums import Sums


class FedNova(Algorithm):
    """Each client's update counts per unit of gradient that went into it, so that clients with more
    steps do not pull the model towards their own optimum (equations 7 and 8 of the paper).

    With ``a`` the sum of the factors with which a client's gradients have entered its update (the
    norm of the paper's vector a_i: the number of steps for plain SGD, more with momentum, less with
    a proximal term), and ``p`` its share of samples::

        weights += (sum of p * a) * (sum of p * update / a)

    With equal numbers of steps this is FedAvg. Buffers, if averaged, are averaged by samples.

    Args:
        mu: weight of a proximal term as in FedProx, 0 for none.
        average_buffers: average BatchNorm's statistics by samples; without, a model that has some
            is refused.
    """

    name = "fednova"

    def __init__(self, mu: float = 0.0, average_buffers: bool = False) -> None:
        self.mu = fraction("mu", mu)
        self.corrects = self.mu > 0
        self.average_buffers = average_buffers

    def check(self, server: Server, per_round: int) -> None:
        options = sgd_options(self.name, server)
        for other in options[1:]:
            if any(
                other[key] != options[0][key] for key in ("momentum", "dampening", "nesterov")
            ) or (self.mu and other["lr"] != options[0]["lr"]):
                raise UserError(
                    "algorithm='fednova': the optimizer's groups have different options, and a "
                    "client has one number "
                    "that says how much gradient went into its update; give all groups the same"
                )

    def correct(
        self,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        own: dict[str, torch.Tensor],
    ) -> None:
        gradients.add_(weights - start, alpha=self.mu)

    def figures(self) -> tuple[str, ...]:
        return ("applied",)

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        applied = torch.tensor(
            [
                gradient_weight(int(steps), sgd_options(self.name, server)[0], self.mu)
                for steps in trained.steps.tolist()
            ],
            dtype=torch.float64,
        )
        updates = trained.updates.to(torch.float64, copy=True)
        updates[:, : server.layout.trained] *= (self._usual(server) / applied)[:, None].to(
            updates.device
        )
        sums.add("update", updates, trained.samples)
        sums.note(trained.slots, applied=applied)

    def aggregate(self, server: Server, sums: Sums) -> None:
        figures = sums.figures()
        shares = figures["ok"] * figures["samples"]
        update = sums.mean("update")
        update[: server.layout.trained] *= float(
            (shares * figures["applied"]).sum() / shares.sum()
        ) / self._usual(server)
        server.weights.add_(update)

    def _usual(self, server: Server) -> float:
        """The gradient in the update of a client of average size: keeps what is summed at the size
        of an update."""
        assert server.local is not None
        steps = server.local.num_steps(max(1, server.num_samples // server.num_clients))
        return gradient_weight(steps, sgd_options(self.name, server)[0], self.mu)


def sgd_options(name: str, server: Server) -> list[dict[str, float]]:
    """The options of the clients' SGD, one of each group. Raises `UserError` when it is another
    optimizer."""
    assert server.local is not None
    optimizer = server.local.optimizer
    if optimizer.kind is not torch.optim.SGD:
        raise UserError(
            f"algorithm={name!r} needs to know how much of each gradient is in an update, which it "
            "does for torch.optim.SGD (momentum too), and clients train with "
            f"{optimizer.kind.__name__}; use SGD, or algorithm='fedavg'"
        )
    return [
        {
            "lr": 0.0,
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            **given,
        }
        for given in optimizer.options
    ]


def gradient_weight(steps: int, options: dict[str, float], mu: float = 0.0) -> float:
    """How much gradient is in an update: the sum of the factors, in units of the learning rate,
    with which the gradients of so many steps of SGD enter ``start - weights``. It is what `steps`
    gradients of 1 give.

    Args:
        steps: of the client.
        options: lr, momentum, dampening and nesterov of `torch.optim.SGD`.
        mu: weight of a proximal term.
    """
    return _gradient_weight(
        steps,
        options["momentum"],
        options["dampening"],
        bool(options["nesterov"]),
        mu * options["lr"],
    )


@lru_cache(maxsize=4096)
def _gradient_weight(
    steps: int, momentum: float, dampening: float, nesterov: bool, pull: float
) -> float:
    if not momentum and not pull:
        return float(steps)
    moved = kept = 0.0
    for step in range(steps):
        gradient = 1.0 - pull * moved
        kept = gradient if step == 0 else momentum * kept + (1.0 - dampening) * gradient
        moved += gradient + momentum * kept if nesterov else kept if momentum else gradient
    return moved
