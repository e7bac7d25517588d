"""`BaseClient`: a client's training in steps that a subclass may override, under COALA's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated.coala.config_sections import ClientConfig
from allhands.federated.coala.datasets import FederatedDataset, Loader
from allhands.federated.local_training import LocalOptimizer

#: Names under which COALA's remote clients do their work, and its clients that sleep.
_REMOVE = "remove it"
HISTORY = "read the history that run() returns"
# Methods of COALA's that nothing calls here, and what to do instead.
NOT_CALLED = {
    "upload": "override post_train",
    "upload_remotely": "override post_train",
    "construct_upload_request": "override post_train",
    "operate": "override run_train",
    "start_service": _REMOVE,
    "connect_to_server": _REMOVE,
    "init_etcd": _REMOVE,
    "simulate_straggler": "set resource_heterogeneous.simulate",
    "track": HISTORY,
    "save_metrics": HISTORY,
    "calculate_model_size": "write sum(p.numel() for p in model.parameters())",
}


class BaseClient:
    """One client. Override what shall be different and call `register_client`; nothing need be
    called in a fixed order by you.

    A round calls `run_train`: `set_model`, `decompression`, `pre_train`, `train`, `post_train`,
    `test_local` (if asked for), `compression`, `encryption`, `post_upload`. Then `self.model` is
    what the client has learnt. `self.model` is one model that all clients of a process share,
    loaded anew for each: keep what shall last in attributes of other names. A client stays in one
    process, so that its attributes last over the rounds, whatever the number of processes. torch's,
    numpy's and random's generators are seeded by (seed, round, client) before it trains.

    Args:
        cid: its name.
        conf: the section ``client`` of the configuration.
        train_data, test_data: of all clients; its own are ``train_data.loader(batch_size,
            self.cid)``.
        device: where it trains.
        options: what COALA passes besides: `sleep_time`, `is_remote`, `local_port`, `server_addr`,
            `tracker_addr`.

    Attributes:
        train_loss: mean loss of each pass over the samples in this round; one that `train` leaves
            empty gives no loss in the history.
        number, round: its number among all clients, and that of the round.
    """

    def __init__(
        self,
        cid: str,
        conf: ClientConfig,
        train_data: FederatedDataset,
        test_data: FederatedDataset | None,
        device: torch.device,
        **options: Any,
    ) -> None:
        self.cid, self.conf, self.train_data = cid, conf, train_data
        self.test_data, self.device = test_data, device
        self.options = options
        self.model: nn.Module | None = None
        self.compressed_model: nn.Module | None = None
        self.train_loader: Any = None
        self.train_loss: list[float] = []
        self.test_accuracy, self.test_loss = 0.0, 0.0
        self.number = self.round = self.seed = 0

    def __getattr__(self, name: str) -> Any:
        return not_here(self, name, NOT_CALLED)

    # ------------------------------------------------------------------ training

    def run_train(self, model: nn.Module, conf: ClientConfig) -> nn.Module:
        """Train from the global model; returns what was learnt."""
        self.conf, self.train_loss = conf, []
        self.set_model(model)
        self.decompression()
        self.pre_train()
        self.train(conf, self.device)
        self.post_train()
        if conf.local_test:
            self.test_local()
        self.compressed_model = None
        self.compression()
        self.encryption()
        self.post_upload()
        learnt = self.compressed_model if self.compressed_model is not None else self.model
        assert learnt is not None
        return learnt

    def set_model(self, model: nn.Module) -> None:
        """Begin with the global model."""
        self.model = model

    def pre_train(self) -> None:
        """Before `train`."""

    def train(self, conf: ClientConfig, device: torch.device | str = "cpu") -> None:
        """Train `self.model`."""
        loss_fn, optimizer = self.pretrain_setup(conf, device)
        assert self.model is not None
        for _ in range(conf.local_epoch):
            total, seen = torch.zeros((), dtype=torch.float64, device=device), 0
            for x, y in self.train_loader:
                x, y = x.to(device), y.to(device)  # noqa: PLW2901
                optimizer.zero_grad()
                loss = loss_fn(self.model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(y)
                seen += len(y)
            self.train_loss.append(float(total) / max(seen, 1))

    def post_train(self) -> None:
        """After `train`."""

    def pretrain_setup(
        self, conf: ClientConfig, device: torch.device | str
    ) -> tuple[Any, torch.optim.Optimizer]:
        """The loss and the optimizer; makes the model ready and sets `train_loader`."""
        assert self.model is not None
        self.model.train()
        self.model.to(device)
        loss_fn, optimizer = self.load_loss_fn(conf), self.load_optimizer(conf)
        self.train_loader = self.load_loader(conf)
        return loss_fn, optimizer

    def load_loss_fn(self, conf: ClientConfig) -> Any:
        """The loss, ``(output, target)`` to one number."""
        return nn.CrossEntropyLoss()

    def load_optimizer(self, conf: ClientConfig) -> torch.optim.Optimizer:
        """The optimizer over `self.model`."""
        assert self.model is not None
        like = LocalOptimizer.of(conf.optimizer.type, self.model, **conf.optimizer.options())
        return like.kind(self.model.parameters(), **like.options[0])

    def load_loader(self, conf: ClientConfig) -> Any:
        """Batches of this client's samples; gone through once for each local epoch."""
        own = self.train_data.indices(self.cid)
        return Loader(
            self.train_data.samples,
            own,
            conf.batch_size,
            True,
            (self.seed, "client", self.round, self.number),
        )

    # ------------------------------------------------------------------ testing

    def run_test(self, model: nn.Module, conf: ClientConfig) -> dict[str, float]:
        """Test the global model; returns the values that `test` returned, or `test_accuracy` and
        `test_loss`."""
        self.conf = conf
        self.set_model(model)
        self.decompression()
        self.pre_test()
        measured = self.test(conf, self.device)
        self.post_test()
        if measured:
            return dict(measured)
        return {"loss": float(self.test_loss), "accuracy": float(self.test_accuracy)}

    def pre_test(self) -> None:
        """Before `test`."""

    def test(
        self, conf: ClientConfig, device: torch.device | str = "cpu"
    ) -> dict[str, float] | None:
        """Test `self.model` on this client's test samples: on all of them where the test set is not
        divided."""
        if self.test_data is None:
            raise UserError("there is no test set; register_dataset(train, test) takes one")
        assert self.model is not None
        loss_fn = self.load_loss_fn(conf)
        self.model.eval()
        self.model.to(device)
        total, right, seen = 0.0, 0, 0
        with torch.no_grad():
            for x, y in self.test_data.loader(conf.test_batch_size, self.cid, shuffle=False):
                output, target = self.model(x.to(device)), y.to(device)
                total += float(loss_fn(output, target)) * len(y)
                right += int((output.argmax(1) == target).sum())
                seen += len(y)
        self.test_loss, self.test_accuracy = total / max(seen, 1), right / max(seen, 1)
        return None

    def post_test(self) -> None:
        """After `test`."""

    def test_local(self) -> None:
        """After the training, with ``client.local_test: true``; override it."""

    # ------------------------------------------------------------------ what travels

    def compression(self) -> None:
        """May set `self.compressed_model` to a model of the same structure, which is then what is
        uploaded."""

    def decompression(self) -> None:
        """Before anything else is done with the global model."""

    def encryption(self) -> None:
        """After `compression`."""

    def post_upload(self) -> None:
        """At the end of `run_train`."""


_TRAINS = (
    "__init__",
    "run_train",
    "set_model",
    "pre_train",
    "train",
    "post_train",
    "pretrain_setup",
    "load_loss_fn",
    "load_optimizer",
    "load_loader",
    "test_local",
    "compression",
    "decompression",
    "encryption",
    "post_upload",
)
_TESTS = (
    "__init__",
    "run_test",
    "set_model",
    "pre_test",
    "test",
    "post_test",
    "load_loss_fn",
    "decompression",
)


def overrides(kind: type, base: type, names: Sequence[str]) -> list[str]:
    """Which of the named methods a class has of its own."""
    return [name for name in names if getattr(kind, name, None) is not getattr(base, name, None)]


def trains_itself(kind: type[BaseClient]) -> bool:
    """Whether a class changes anything about how a client is trained."""
    return bool(overrides(kind, BaseClient, _TRAINS))


def tests_itself(kind: type[BaseClient]) -> bool:
    """Whether a class changes anything about how a client is tested."""
    return bool(overrides(kind, BaseClient, _TESTS))


def check_client(kind: Any) -> type[BaseClient]:
    """A class for `register_client`. Raises `UserError` for anything else, or a method that nothing
    would call."""
    check_class(kind, BaseClient, "register_client")
    check_called(kind, NOT_CALLED)
    return kind


def not_here(owner: object, name: str, names: dict[str, str]) -> NoReturn:
    """Raise `UserError` for a method of COALA's that is called and is not here, `AttributeError`
    for any other."""
    kind = type(owner).__name__
    if name in names:
        raise UserError(f"{kind}.{name} is not here, since clients are simulated; {names[name]}")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def check_class(kind: Any, base: type, function: str) -> None:
    """Raise `UserError` unless `kind` is a class derived from `base`."""
    if not isinstance(kind, type):
        if not callable(kind) or isinstance(kind, base):
            given = f"an object of the class {type(kind).__name__}"
        else:
            given = f"{kind!r}"
        raise UserError(
            f"{function}: it takes a class derived from {base.__name__}, and {given} was passed; "
            "pass the class itself"
        )
    if not issubclass(kind, base):
        raise UserError(
            f"{function}: {kind.__name__} is not derived from {base.__name__}; write "
            f"class {kind.__name__}(allhands.federated.{base.__name__})"
        )


def check_called(kind: type, names: dict[str, str]) -> None:
    """Raise `UserError` for methods of a class that COALA would call and nothing here does."""
    for name, instead in names.items():
        if hasattr(kind, name):
            raise UserError(
                f"{kind.__name__}.{name} would never be called, since clients are simulated; "
                f"{instead}"
            )
