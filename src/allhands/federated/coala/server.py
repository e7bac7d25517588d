"""`BaseServer`: the rounds in steps that a subclass may override, under COALA's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.algorithms import Server
from allhands.federated.coala.client import (
    HISTORY,
    BaseClient,
    check_called,
    check_class,
    not_here,
    overrides,
)
from allhands.federated.coala.config import Config
from allhands.federated.coala.datasets import FederatedDataset
from allhands.world import World

#: Names under which COALA's servers work over a network, measure speeds and keep uploads.
_REMOVE = "remove it"
_IN_CLIENT = "override test_in_client"
_AGGREGATE = "override aggregate(models, weights)"
# Methods of COALA's that nothing calls here, and what to do instead.
NOT_CALLED = {
    "start_service": _REMOVE,
    "start_remote_training": _REMOVE,
    "connect_remote_clients": _REMOVE,
    "init_etcd": _REMOVE,
    "stop": "override should_terminate",
    "is_training": _REMOVE,
    "condition": _REMOVE,
    "notify_all": _REMOVE,
    "set_clients": "override selection(clients, clients_per_round)",
    "distribution_to_train_locally": "override distribution_to_train",
    "distribution_to_train_remotely": "override distribution_to_train",
    "distribution_to_test": _IN_CLIENT,
    "distribution_to_test_locally": _IN_CLIENT,
    "distribution_to_test_remotely": _IN_CLIENT,
    "aggregation_test": _IN_CLIENT,
    "profile_training_speed": _REMOVE,
    "update_default_time": _REMOVE,
    "decompression": _AGGREGATE,
    "set_client_uploads": _AGGREGATE,
    "set_client_uploads_customize_content": _AGGREGATE,
    "set_client_uploads_train": _AGGREGATE,
    "set_client_uploads_test": _IN_CLIENT,
    "get_client_uploads": _AGGREGATE,
    "gather_client_train_metrics": HISTORY,
    "init_tracker": HISTORY,
    "track": HISTORY,
    "track_test_results": HISTORY,
    "track_communication_cost": HISTORY,
    "save_tracker": HISTORY,
}


class RoundsOfServer(Protocol):
    """What a `BaseServer` asks of the rounds that call it; see `ServerRounds`."""

    server: Server
    world: World

    def one_round(self) -> dict[str, dict[str, float]]: ...

    def stages(self) -> None: ...

    def ends(self) -> bool: ...

    def draw(self, number: int) -> list[int]: ...

    def train_cohort(self) -> None: ...

    def apply(self) -> None: ...

    def model(self) -> nn.Module: ...

    def replace_model(self, given: Any) -> None: ...

    def save(self) -> None: ...

    def test(self, round_: int) -> dict[str, float]: ...

    def test_in_server(self) -> dict[str, float]: ...

    def test_in_client(self) -> dict[str, float]: ...

    def say(self, text: str) -> None: ...


class BaseServer:
    """The aggregating side. Every process has one, and runs the same steps on the same model, so
    that what you override must give the same on each: torch's, numpy's and random's generators are
    seeded by (seed, round) before `selection`.

    A round calls `pre_train`, `train` (`selection`, `grouping_for_distributed`, `compression`,
    `distribution_to_train`, `aggregation`), `post_train`; every ``test_every`` rounds `pre_test`,
    `test` (`test_in_server` or `test_in_client`), `post_test`; and `save_model`.

    Args:
        conf: the whole configuration.
        test_data: on ``test_mode: test_in_server``.
        val_data: what `register_dataset` got as `val_data`.
        options: what COALA passes besides: `is_remote`, `local_port`.

    Attributes:
        selected_clients: the cohort.
    """

    def __init__(
        self,
        conf: Config,
        test_data: FederatedDataset | None = None,
        val_data: FederatedDataset | None = None,
        **options: Any,
    ) -> None:
        self.conf, self.test_data, self.val_data, self.options = conf, test_data, val_data, options
        self.selected_clients: Sequence[BaseClient] = []
        self._clients: Sequence[BaseClient] = []
        self._model: nn.Module | None = None
        self._rounds: RoundsOfServer

    def __getattr__(self, name: str) -> Any:
        return not_here(self, name, NOT_CALLED)

    @property
    def _current_round(self) -> int:
        return self._rounds.server.round

    @property
    def model(self) -> nn.Module:
        """The global model; a copy with its present weights."""
        return self._rounds.model()

    # ------------------------------------------------------------------ the rounds

    def start(self, model: nn.Module, clients: Sequence[BaseClient]) -> None:
        """All rounds."""
        self._model, self._clients = model, clients
        if self.conf.server.visualize:
            self.init_visualization()
        if self.conf.server.test_all:
            self._rounds.test(-1)
        while self._rounds.server.round < self.conf.server.rounds and not self._rounds.ends():
            self._rounds.one_round()

    def should_terminate(self) -> bool:
        """Whether to end before the last round; what the first process answers counts."""
        return False

    def pre_train(self) -> None:
        """Before `train`."""

    def train(self) -> None:
        """One round; an override calls ``super().train()``."""
        self._rounds.stages()

    def post_train(self) -> None:
        """After `train`."""

    def selection(
        self, clients: Sequence[BaseClient], clients_per_round: int
    ) -> Sequence[BaseClient] | None:
        """The cohort: some of `clients`, returned or left in `selected_clients`."""
        self.selected_clients = [clients[number] for number in self._rounds.draw(clients_per_round)]
        return self.selected_clients

    def grouping_for_distributed(self) -> None:
        """After `selection`. Who trains which client is
        ``resource_heterogeneous.grouping_strategy``'s to say."""

    def compression(self) -> None:
        """Before the model is handed to the clients."""

    def distribution_to_train(self) -> None:
        """Train the cohort; an override calls ``super().distribution_to_train()``."""
        self._rounds.train_cohort()

    def aggregation(self) -> None:
        """Change the global model; an override calls ``super().aggregation()``."""
        self._rounds.apply()

    def aggregate(
        self, models: Sequence[nn.Module], weights: Sequence[float]
    ) -> nn.Module | dict[str, torch.Tensor]:
        """The new global model, of the models of the whole cohort and their numbers of samples.

        Without an override the cohort is summed on the devices and its models never meet; with one,
        every process holds all of them at once.

        Returns:
            A model, or its state dict.
        """
        raise UserError(
            "aggregate(models, weights) exists to be overridden; the mean needs no override: "
            "server.aggregation_strategy is 'FedAvg' or 'equal'"
        )

    def set_model(self, model: nn.Module | dict[str, torch.Tensor], load_dict: bool = True) -> None:
        """Replace the global model's weights by those of a model or a state dict."""
        self._rounds.replace_model(model)

    # ------------------------------------------------------------------ testing

    def pre_test(self) -> None:
        """Before `test`."""

    def test(self) -> dict[str, float]:
        """The values of the global model by name."""
        if self.conf.test_mode == "test_in_server":
            return self.test_in_server(self._rounds.server.device)
        return self.test_in_client()

    def test_in_server(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """Loss and accuracy on the whole test set; the first process's answer counts."""
        return self._rounds.test_in_server()

    def test_in_client(self) -> dict[str, float]:
        """The mean over `get_test_clients` of the values on their test samples; where the test set
        is not divided, all would give what the whole of it gives."""
        return self._rounds.test_in_client()

    def get_test_clients(self) -> Sequence[BaseClient]:
        """The clients that test: the cohort, or all with ``server.test_all``."""
        if self.conf.server.test_all or not self.selected_clients:
            return self._clients
        return self.selected_clients

    def post_test(self) -> None:
        """After `test`."""

    # ------------------------------------------------------------------ what is told and kept

    def save_model(self) -> None:
        """Write the weights; called in the first process only."""
        self._rounds.save()

    def num_of_clients(self) -> int:
        """How many there are."""
        return len(self._clients)

    def print_(self, content: str) -> None:
        """Print from the first process, unless ``tracking.log_level`` is above INFO."""
        self._rounds.say(content)

    def is_primary_server(self) -> bool:
        """Whether this is the first process."""
        return self._rounds.world.is_main

    def init_visualization(self) -> None:
        """Before the first round, with ``server.visualize: true``; override it."""

    def tracking_visualization(self, results: dict[str, float]) -> None:
        """After each test, with ``server.visualize: true``; override it."""


def check_server(kind: Any) -> type[BaseServer]:
    """A class for `register_server`. Raises `UserError` for anything else, or a method that nothing
    would call."""
    check_class(kind, BaseServer, "register_server")
    check_called(kind, NOT_CALLED)
    return kind


def overridden(server: BaseServer, name: str) -> bool:
    """Whether the server's class has a method of its own."""
    return bool(overrides(type(server), BaseServer, [name]))
