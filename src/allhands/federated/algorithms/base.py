"""What distinguishes one federated algorithm from another: a few steps of arithmetic on flat
vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.row_layout import RowLayout
from allhands.federated.sums import Sums

if TYPE_CHECKING:
    from allhands.federated.clients import Clients
    from allhands.federated.local_training import LocalTraining
    from allhands.world import World

#: Figures of a client that every algorithm's sums carry; `ok` is 1 for a client that has trained,
#: `bad` for one whose model came out with NaN or Inf; `failed` and `retried` are those of
#: `Failures`; `rank` is the one that has trained it.
FIGURES = ("ok", "samples", "steps", "loss", "seconds", "bad", "failed", "retried", "rank")
#: The name of a client's own layers among what it keeps.
OWN_LAYERS = "own layers"
#: The name in `Trained.own` of the gradient that clients have found before they trained.
START_GRADIENT = "start gradient"


@dataclass
class Server:
    """What the aggregating side holds; the same on every rank.

    Attributes:
        layout: where weights lie in a row.
        weights: the global model, shape ``[length]``.
        integers: its integer buffers, int64.
        device: where rows lie.
        round: the round that is being computed, from 0.
        num_clients: all clients, not only the cohort.
        seed: the run's seed.
        learning_rate: of the clients' optimizer (first group) in this round.
        num_samples: samples of all clients.
        local: how clients train; set by `Rounds`, as are the following.
        world: the ranks.
        own: places in a row of the numbers that each client keeps as its own, int64; None: none.
    """

    layout: RowLayout
    weights: torch.Tensor
    integers: torch.Tensor
    device: torch.device
    num_clients: int
    seed: int
    round: int = 0
    learning_rate: float = 0.0
    num_samples: int = 0
    local: LocalTraining | None = None
    world: World | None = None
    own: torch.Tensor | None = None

    @classmethod
    def of(
        cls, model: nn.Module, layout: RowLayout, device: torch.device, num_clients: int, seed: int
    ) -> Self:
        """A server whose global model is `model`."""
        weights, integers = layout.read(model), layout.read_integers(model)
        return cls(layout, weights, integers, device, num_clients, seed)

    def start(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model that clients begin with, given what `ClientStates.get` gave: shape
        ``[length]``, or ``[clients, length]`` where they keep layers of their own."""
        if self.own is None:
            return self.weights
        kept = state[OWN_LAYERS]  # and a 1 once the client has trained
        start = self.weights.expand(len(kept), -1).clone()
        start[:, self.own] = torch.where(kept[:, -1:] > 0, kept[:, :-1], start[:, self.own])
        return start


@dataclass
class Trained:
    """Clients that have trained together, one row each.

    Attributes:
        clients, slots: their numbers among all clients, and their places in the cohort.
        rows: their models, shape ``[clients, length]``; overwritten by the next ones.
        start: the model that they began with, shape ``[length]``; ``[clients, length]`` where they
            keep layers of their own.
        samples, steps: float64, shape ``[clients]``.
        loss: mean training loss over the samples that they saw.
        start_loss: mean loss of the model that they began with on their data, where the algorithm
            `needs_start_loss`.
        own: the algorithm's state of each client by name, shape ``[clients, …]``; what `contribute`
            leaves here is kept. Also `START_GRADIENT`, shape ``[clients, trained]``, where the
            algorithm `needs_start_gradient`, which is not kept.
        integers: their integer buffers, int64, shape ``[clients, numbers]``; None where the model
            has none.
        received: what the server gets of their updates where that is not all, shape ``[clients,
            length]``.
    """

    clients: list[int]
    slots: list[int]
    rows: torch.Tensor
    start: torch.Tensor
    samples: torch.Tensor
    steps: torch.Tensor
    loss: torch.Tensor
    start_loss: torch.Tensor | None = None
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    integers: torch.Tensor | None = None
    received: torch.Tensor | None = None

    def only(self, rows: Sequence[int]) -> Trained:
        """Some of them; copies."""
        wanted = list(rows)
        pick = {
            name: None if value is None else value[wanted]
            for name, value in (("start_loss", self.start_loss), ("integers", self.integers))
        }
        return Trained(
            [self.clients[row] for row in wanted],
            [self.slots[row] for row in wanted],
            self.rows[wanted],
            self.start if self.start.dim() == 1 else self.start[wanted],
            self.samples[wanted],
            self.steps[wanted],
            self.loss[wanted],
            own={name: value[wanted] for name, value in self.own.items()},
            **pick,
        )

    @property
    def updates(self) -> torch.Tensor:
        """What training has changed, as the server receives it: shape ``[clients, length]``; a new
        tensor."""
        return self.rows - self.start if self.received is None else self.received.clone()


class Algorithm(ABC):
    """One federated algorithm. An object holds settings, and after `begin` the state of the server.

    All clients' arithmetic is on tensors of shape ``[clients, numbers]``, in place, so that it
    serves one client at a time, many at once, and a CUDA graph alike.
    """

    #: The name by which it is chosen.
    name: str
    #: Whether `correct` changes gradients.
    corrects: bool = False
    #: Whether clients evaluate the model that they get before they train it.
    needs_start_loss: bool = False
    #: Whether clients find the gradient of their mean loss at the model that they get, over all of
    #: their data, before they train.
    needs_start_gradient: bool = False
    #: Whether a global model results at all; without one, each client keeps its own.
    shares: bool = True
    #: Whether floating-point buffers (BatchNorm's statistics) are averaged; without, a model that
    #: has some is refused.
    average_buffers: bool = True

    def keeps(self, model: nn.Module) -> list[str]:
        """Names of the modules, parameters and buffers that each client keeps as its own; the
        others are shared."""
        return []

    def prepare(
        self, clients: Clients, local: LocalTraining, per_round: int
    ) -> tuple[Clients, LocalTraining, int]:
        """The clients, their training and their number in a round, changed as the algorithm needs;
        called before anything else is made."""
        return clients, local, per_round

    def begin(self, server: Server) -> None:
        """Make the server's own state; called once, before the first round and before
        `load_state_dict`."""

    def client_state(self, server: Server) -> dict[str, int]:
        """Vectors that each client keeps from one of its rounds to the next, which begin as zeros:
        name to length."""
        return {}

    def correct(
        self,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        start: torch.Tensor,
        own: dict[str, torch.Tensor],
    ) -> None:
        """Change clients' gradients before each of their optimizer steps, in place; reads and
        writes no Python numbers of the round, for it may be recorded in a graph.

        Args:
            gradients, weights: shape ``[clients, trained]``.
            start: the model that the round began with, shape ``[trained]`` or ``[clients,
                trained]``.
            own: `client_state`, shape ``[clients, …]``.
        """

    def vectors(self, server: Server) -> dict[str, int]:
        """The sums over the cohort that `aggregate` needs: name to length."""
        return {"update": server.layout.length}

    def beside_model(self, server: Server) -> tuple[int, int]:
        """Numbers that a client gets beside the model, and that it sends beside its update."""
        return 0, 0

    def beside(self, server: Server) -> dict[str, torch.Tensor]:
        """The server's own tensors that clients get beside the model, by name. A client on another
        machine copies what it gets into its own ones, after `begin`."""
        return {}

    def figures(self) -> tuple[str, ...]:
        """Further figures of a client that `aggregate` needs, beside `FIGURES`."""
        return ()

    def contribute(self, trained: Trained, server: Server, sums: Sums) -> None:
        """Add what clients have learnt to the cohort's sums. The default: their updates, weighted
        by samples."""
        sums.add("update", trained.updates, self.weights(trained))

    def weights(self, trained: Trained) -> torch.Tensor:
        """How much each client counts: float64, shape ``[clients]``. The default: its samples."""
        return trained.samples

    @abstractmethod
    def aggregate(self, server: Server, sums: Sums) -> None:
        """Change `server.weights` in place, the same way on every rank. Called only when some
        client has contributed."""

    def check(self, server: Server, per_round: int) -> None:
        """Raise `UserError` for settings that cannot be honoured with this model and cohort, before
        the first round."""

    def state_dict(self) -> dict[str, Any]:
        """The server's own state: tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""


def fraction(
    name: str, value: Any, low: float = 0.0, high: float = float("inf"), *, open_low: bool = False
) -> float:
    """A number within bounds, or `UserError` that names the option."""
    ok = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value <= high
        and not (open_low and value == low)
    )
    if not ok:
        upper = "" if high == float("inf") else f" and at most {high:g}"
        raise UserError(
            f"{name}={value!r}; it must be a number {'above' if open_low else 'of at least'} "
            f"{low:g}{upper}"
        )
    return float(value)
