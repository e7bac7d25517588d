"""FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021; FedAvgM: Hsu et al., Measuring
the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from allhands.errors import UserError
from allhands.federated.algorithms.base import Algorithm, Server, Trained, fraction
from allhands.federated.local_training import LocalOptimizer
from allhands.federated.sums import Sums


class _ServerOptimizer(Algorithm):
    """The cohort's mean update is, with its sign turned, the gradient of an optimizer of the
    server. Buffers, if averaged, are averaged by samples: an optimizer's step could make a variance
    negative."""

    def __init__(self, weighted: bool, average_buffers: bool) -> None:
        self.weighted, self.average_buffers = weighted, average_buffers

    def weights(self, trained: Trained) -> torch.Tensor:
        return trained.samples if self.weighted else torch.ones_like(trained.samples)

    def aggregate(self, server: Server, sums: Sums) -> None:
        update, numbers = sums.mean("update"), server.layout.trained
        server.weights[numbers:].add_(update[numbers:])
        self.step(server.weights[:numbers], update[:numbers])

    @abstractmethod
    def step(self, weights: torch.Tensor, update: torch.Tensor) -> None:
        """Change the trained weights, shape ``[trained]``, in place, by the mean update in
        float64."""


class FedAvgM(_ServerOptimizer):
    """Momentum on the server: ``v = momentum * v + update; weights += server_lr * v`` (Hsu et al.
    2019, section 4.3).

    Args:
        momentum: at least 0 and below 1; 0 with `server_lr` 1 is FedAvg.
        server_lr: the server's step.
        weighted: see `FedAvg`.
        average_buffers: average BatchNorm's statistics by samples; False refuses a model that has
            some.
    """

    name = "fedavgm"

    def __init__(
        self,
        momentum: float = 0.9,
        server_lr: float = 1.0,
        weighted: bool = True,
        average_buffers: bool = True,
    ) -> None:
        super().__init__(weighted, average_buffers)
        self.momentum = _decay("momentum", momentum)
        self.server_lr = fraction("server_lr", server_lr, open_low=True)

    def begin(self, server: Server) -> None:
        self.velocity = torch.zeros(
            server.layout.trained, dtype=torch.float64, device=server.device
        )

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> None:
        self.velocity.mul_(self.momentum).add_(update)
        weights.add_(self.server_lr * self.velocity)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocity.copy_(state["velocity"])


class _Adaptive(_ServerOptimizer):
    """Algorithm 2 of Reddi et al. 2021; `grow` is what distinguishes its three."""

    def __init__(
        self, server_lr: float, beta1: float, tau: float, weighted: bool, average_buffers: bool
    ) -> None:
        super().__init__(weighted, average_buffers)
        self.server_lr = fraction("server_lr", server_lr, open_low=True)
        self.beta1 = _decay("beta1", beta1)
        self.tau = fraction("tau", tau, open_low=True)

    def begin(self, server: Server) -> None:
        self.m = torch.zeros(server.layout.trained, dtype=torch.float64, device=server.device)
        self.v = torch.full_like(self.m, self.tau**2)

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> None:
        self.m.mul_(self.beta1).add_(update, alpha=1 - self.beta1)
        self.grow(update.square())
        weights.add_(self.server_lr * self.m / (self.v.sqrt() + self.tau))

    @abstractmethod
    def grow(self, squares: torch.Tensor) -> None:
        """Change `v` in place by the squares of the update."""

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.m, "v": self.v}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])


class FedAdagrad(_Adaptive):
    """FedAdagrad of algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    ::

        m = beta1 * m + (1 - beta1) * update
        v = v + update ** 2
        weights += server_lr * m / (sqrt(v) + tau)

    with v begun at ``tau ** 2``, and without correction of the bias.

    Args:
        server_lr: the paper's eta.
        beta1: decay of m.
        tau: how adaptive, above 0: the smaller, the more.
        weighted: see `FedAvg`.
        average_buffers: average BatchNorm's statistics by samples; without, a model that has some
            is refused.
    """

    name = "fedadagrad"

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        weighted: bool = True,
        average_buffers: bool = False,
    ) -> None:
        super().__init__(server_lr, beta1, tau, weighted, average_buffers)

    def grow(self, squares: torch.Tensor) -> None:
        self.v.add_(squares)


class _SecondMoment(_Adaptive):
    """An optimizer whose v decays by beta2."""

    def __init__(
        self,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        weighted: bool = True,
        average_buffers: bool = False,
    ) -> None:
        super().__init__(server_lr, beta1, tau, weighted, average_buffers)
        self.beta2 = _decay("beta2", beta2)


class FedYogi(_SecondMoment):
    """FedYogi of algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    ::

        m = beta1 * m + (1 - beta1) * update
        v = v - (1 - beta2) * update ** 2 * sign(v - update ** 2)
        weights += server_lr * m / (sqrt(v) + tau)

    with v begun at ``tau ** 2``, and without correction of the bias.

    Args:
        server_lr: the paper's eta.
        beta1: decay of m.
        beta2: decay of v.
        tau: how adaptive, above 0: the smaller, the more.
        weighted: see `FedAvg`.
        average_buffers: average BatchNorm's statistics by samples; without, a model that has some
            is refused.
    """

    name = "fedyogi"

    def grow(self, squares: torch.Tensor) -> None:
        self.v.sub_((1 - self.beta2) * squares * (self.v - squares).sign())


class FedAdam(_SecondMoment):
    """FedAdam of algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    ::

        m = beta1 * m + (1 - beta1) * update
        v = beta2 * v + (1 - beta2) * update ** 2
        weights += server_lr * m / (sqrt(v) + tau)

    with v begun at ``tau ** 2``, and without correction of the bias. `FedOpt` with Adam has torch's
    arithmetic, which is another.

    Args:
        server_lr: the paper's eta.
        beta1: decay of m.
        beta2: decay of v.
        tau: how adaptive, above 0: the smaller, the more.
        weighted: see `FedAvg`.
        average_buffers: average BatchNorm's statistics by samples; without, a model that has some
            is refused.
    """

    name = "fedadam"

    def grow(self, squares: torch.Tensor) -> None:
        self.v.mul_(self.beta2).add_(squares, alpha=1 - self.beta2)


class FedOpt(_ServerOptimizer):
    """Any optimizer of torch.optim on the server (Reddi et al. 2021, algorithm 1), with torch's own
    arithmetic: Adam here corrects the bias and begins with v = 0, and is not `FedAdam`. SGD with a
    learning rate of 1 is FedAvg.

    Args:
        optimizer: the name of a class of torch.optim that treats every number alike.
        options: of that class, ``{"lr": 1.0}`` for instance; what is left out is torch's default,
            and 1 the learning rate of SGD.
        weighted: see `FedAvg`.
        average_buffers: average BatchNorm's statistics by samples; without, a model that has some
            is refused.
    """

    name = "fedopt"

    def __init__(
        self,
        optimizer: str = "SGD",
        options: dict[str, Any] | None = None,
        weighted: bool = True,
        average_buffers: bool = False,
    ) -> None:
        super().__init__(weighted, average_buffers)
        found = {name.lower(): name for name in LocalOptimizer.ELEMENTWISE}.get(
            str(optimizer).lower()
        )
        if found is None:
            raise UserError(
                f"algorithm='fedopt': there is no optimizer {optimizer!r} for the server's one "
                f"vector; use one of {', '.join(LocalOptimizer.ELEMENTWISE)}"
            )
        self.kind = getattr(torch.optim, found)
        self.options = {**({"lr": 1.0} if found == "SGD" else {}), **(options or {})}
        try:
            self.kind([torch.zeros(1, requires_grad=True)], **self.options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"algorithm='fedopt': options={options!r} do not suit {found}: {error}"
            ) from error

    def begin(self, server: Server) -> None:
        self._weights = server.weights[: server.layout.trained].detach().clone().requires_grad_()
        self.optimizer = self.kind([self._weights], **self.options)

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> None:
        with torch.no_grad():
            self._weights.copy_(weights)
        self._weights.grad = update.neg().to(weights.dtype)
        self.optimizer.step()
        weights.copy_(self._weights.detach())

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def _decay(name: str, value: Any) -> float:
    found = fraction(name, value, high=1.0)
    if found == 1.0:
        raise UserError(f"{name}={value!r}; it must be below 1")
    return found
