"""Differential privacy of clients: DP-FedAvg (McMahan et al., Learning Differentially Private
Recurrent Language Models, ICLR 2018). Each client's update is clipped, and the mean gets Gaussian
noise."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

from allhands.checks import check_choice
from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.sums import Sums

SAMPLINGS = ("fixed", "poisson")


class Privacy:
    """Clipping, noise, and what they guarantee: (epsilon, delta)-differential privacy of each
    client's whole data, towards someone who sees the global models.

    The mean is the sum of the clipped updates over the expected number of clients, however many
    there are (the paper's estimator with a fixed denominator), plus noise of the standard deviation
    ``noise_multiplier * clip / per_round``.

    Args:
        clip: bound of the norm of a client's update, buffers included; infinity only without noise.
        noise_multiplier: of the noise of the sum, in units of `clip`; 0: none, and epsilon is
            infinite.
        delta: the probability that the guarantee allows itself; below 1 / clients.
        sampling: "poisson": each client is in the cohort with the probability ``per_round /
            clients``, so that cohorts differ in size; "fixed": `per_round` of them, drawn without
            repetition.

    Raises:
        UserError: an option out of its bounds.
    """

    def __init__(
        self, clip: float, noise_multiplier: float, delta: float = 1e-5, sampling: str = "poisson"
    ) -> None:
        self.clip = fraction("clip", clip, open_low=True)
        self.noise_multiplier = fraction("noise_multiplier", noise_multiplier)
        self.delta = fraction("delta", delta, high=1.0, open_low=True)
        check_choice("sampling", sampling, SAMPLINGS)
        self.sampling = sampling
        if self.noise_multiplier and not math.isfinite(self.clip):
            raise UserError(
                f"clip={clip!r} with noise_multiplier={noise_multiplier!r}: the noise is a "
                "multiple of clip; write a finite clip"
            )
        #: Decides cohorts and noise in place of the run's seed, where others know that one; None:
        #: nobody else does.
        self.secret: int | None = None
        self._accountant: Any = None

    def check(self, algorithm: Algorithm, server: Server, per_round: int) -> None:
        """Refuse what the guarantee would not hold for, before the first round, and prepare the
        accounting.

        Raises:
            UserError: the algorithm weighs clients or sends more than one update, the model counts
                batches in integers, `delta` is too large, or the accountant's library is missing.
        """
        uniform = (
            type(algorithm).contribute is Algorithm.contribute
            and list(algorithm.vectors(server)) == ["update"]
            and getattr(algorithm, "weighted", None) is False
        )
        if not uniform:
            raise UserError(
                "privacy= needs an algorithm whose clients send one update and all count the same, "
                f"and algorithm={algorithm.name!r} is none, as it is set; write "
                "algorithm={'name': 'fedavg', 'weighted': False}"
            )
        if server.layout.integers:
            raise UserError(
                f"privacy= with the integer buffer '{server.layout.integers[0]}', whose mean gets "
                "no noise; use GroupNorm, or track_running_stats=False"
            )
        if (
            self.delta >= 1 / server.num_clients
            and server.num_clients > 1
            and self.noise_multiplier
        ):
            raise UserError(
                f"delta={self.delta:g} of {server.num_clients} clients allows that a whole client "
                "is given away; "
                f"write less than 1 / clients, such as delta={0.1 / server.num_clients:.0e}"
            )
        if self.noise_multiplier:
            self._accountant = _accountant(
                self.noise_multiplier, server.num_clients, per_round, self.sampling
            )

    def select(self, server: Server, per_round: int, round_: int) -> list[int]:
        """The cohort of Poisson sampling; may be empty. Costs as much as the cohort is large."""
        seed = derive_seed(self._seed(server), "cohort", round_)
        number = int(
            np.random.default_rng(seed).binomial(server.num_clients, per_round / server.num_clients)
        )
        return sorted(random.Random(seed).sample(range(server.num_clients), number))

    def bound(self, trained: Trained) -> None:
        """Let the updates of clients be what the server receives of them: clipped, row by row."""
        updates = trained.updates
        norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True, dtype=torch.float64)
        trained.received = updates.mul_(
            (self.clip / norms.clamp_min(1e-300)).clamp_(max=1.0).to(updates.dtype)
        )

    def release(self, server: Server, sums: Sums, per_round: int) -> None:
        """Let the mean of the cohort's updates be the noisy one; the same numbers on every rank and
        device."""
        mean = sums.total("update") / sums.scale
        if self.noise_multiplier:
            mean = mean + self._noise(server).to(mean.device)
        sums.set_mean("update", mean / per_round)

    def _noise(self, server: Server) -> torch.Tensor:
        """Noise of the sum: float64, shape ``[length]``; 0 in the gaps of a row and where clients
        keep numbers as their own."""
        generator = torch.Generator().manual_seed(
            derive_seed(self._seed(server), "privacy", server.round)
        )
        noise = torch.zeros(server.layout.length, dtype=torch.float64)
        for place in server.layout.places:
            noise[place.start : place.stop] = torch.randn(
                place.stop - place.start, generator=generator, dtype=torch.float64
            )
        if server.own is not None:
            noise[server.own.cpu()] = 0.0
        return noise * (self.noise_multiplier * self.clip)

    def _seed(self, server: Server) -> int:
        return server.seed if self.secret is None else self.secret

    def epsilon(self, rounds: int) -> float:
        """Epsilon at `delta` after so many rounds; infinite without noise."""
        if self._accountant is None:
            return math.inf
        from dp_accounting import rdp

        # What one round costs adds up over rounds; asking the accountant to compose them anew would
        # take a tenth of a second.
        return float(
            rdp.compute_epsilon(
                self._accountant._orders, self._accountant._rdp * rounds, self.delta
            )[0]
        )


def _accountant(noise_multiplier: float, clients: int, per_round: int, sampling: str) -> Any:
    """The accountant of Renyi differential privacy after one round."""
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise UserError(
            "privacy= needs the library that computes epsilon; pip install 'allhands[privacy]'"
        ) from None

    relation = dp_accounting.NeighboringRelation
    if sampling == "poisson":
        accountant = rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
        noise = dp_accounting.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(per_round / clients, noise))
    else:
        # A client that is replaced by another changes the sum by up to twice the bound.
        accountant = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
        noise = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        accountant.compose(
            dp_accounting.SampledWithoutReplacementDpEvent(clients, per_round, noise)
        )
    return accountant
