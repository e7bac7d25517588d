"""One use of each of the peers' calls that are here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import allhands.federated as coala
from allhands import kvstore as kv


def mxnet(folder: Path) -> dict[str, Callable[[], Any]]:
    """What uses each call of a store and a trainer and gives the same on every worker."""
    made: dict[str, Any] = {}

    def create() -> str:
        made["store"] = kv.create("dist_sync")
        made["store"].init(["a", "b"], [torch.zeros(2), torch.ones(2)])
        made["store"].init("rows", kv.RowSparse(3, 2, std=1.0))
        return str(made["store"].type)

    def pulled(key: str = "a") -> torch.Tensor:
        out = torch.empty(2)
        made["store"].pull(key, out=out)
        return out

    def after(call: Callable[[Any], Any], result: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            call(made["store"])
            return result()

        return run

    def pushpull(store: Any) -> torch.Tensor:
        value = torch.ones(2)
        store.pushpull("a", value)
        return value

    def rows(store: Any) -> torch.Tensor:
        out = torch.zeros(2, 2)
        store.row_sparse_pull("rows", out=out, row_ids=torch.tensor([0, 2]))
        return out

    def broadcast(store: Any) -> torch.Tensor:
        out = torch.zeros(2)
        store.broadcast("c", torch.full((2,), float(store.rank)), out)
        return out

    def trainer() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        made["net"] = net
        made["trainer"] = kv.Trainer(net, "adam", {"learning_rate": 0.1}, kvstore="dist_sync")
        # Without updates in the store, gradients can be summed and applied apart.
        own = nn.Linear(2, 1)
        made["own"] = own
        made["apart"] = kv.Trainer(
            own, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync", update_on_kvstore=False
        )
        return True

    def step() -> list[float]:
        made["net"](torch.ones(1, 2)).sum().backward()
        made["trainer"].step(1)
        return made["net"].weight.flatten().tolist()

    def summed() -> list[float]:
        made["own"](torch.ones(1, 2)).sum().backward()
        made["apart"].allreduce_grads()
        return made["own"].weight.grad.flatten().tolist()

    def update() -> list[float]:
        made["apart"].update(1)
        return made["own"].weight.flatten().tolist()

    path = str(folder / "states")
    return {
        "create": create,
        "KVStore": lambda: isinstance(made["store"], kv.KVStore),
        "KVStore.type": lambda: made["store"].type,
        "KVStore.rank": lambda: made["store"].rank in (0, 1),
        "KVStore.num_workers": lambda: made["store"].num_workers,
        "KVStore.is_capable": lambda: made["store"].is_capable("optimizer"),
        "KVStore.init": lambda: made["store"].init("d", torch.zeros(1)),
        "KVStore.push": after(lambda store: store.push("a", torch.ones(2)), pulled),
        "KVStore.pull": pulled,
        "KVStore.pushpull": lambda: pushpull(made["store"]),
        "KVStore.broadcast": lambda: broadcast(made["store"]),
        "KVStore.row_sparse_pull": lambda: rows(made["store"]),
        "KVStore.set_optimizer": after(
            lambda store: store.set_optimizer("sgd", {"learning_rate": 0.1}),
            lambda: made["store"].push("b", torch.ones(2)) or pulled("b"),
        ),
        "KVStore.save_optimizer_states": lambda: made["store"].save_optimizer_states(path),
        "KVStore.load_optimizer_states": lambda: made["store"].load_optimizer_states(path),
        "KVStore.set_gradient_compression": lambda: kv.create("dist_sync").set_gradient_compression(
            {"type": "2bit", "threshold": 0.5}
        ),
        "Trainer": trainer,
        "Trainer.step": step,
        "Trainer.learning_rate": lambda: made["trainer"].learning_rate,
        "Trainer.set_learning_rate": lambda: made["trainer"].set_learning_rate(0.2),
        "Trainer.allreduce_grads": summed,
        "Trainer.update": update,
        "Trainer.optimizer": lambda: isinstance(made["apart"].optimizer, torch.optim.SGD),
        "Trainer.save_states": lambda: made["trainer"].save_states(path),
        "Trainer.load_states": lambda: made["trainer"].load_states(path),
        "split_data": lambda: [part.tolist() for part in kv.split_data(torch.arange(4), 2)],
        "split_and_load": lambda: [
            part.tolist() for part in kv.split_and_load(torch.arange(4), ["cpu", "cpu"])
        ],
    }


def recorded(kind: type, names: list[str], called: set[str]) -> type:
    """A class whose methods note that they were called, and do what they did."""

    def noting(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            called.add(f"{kind.__name__}.{name}")
            return getattr(super(made, self), name)(*args, **options)

        return method

    made = type(f"Noted{kind.__name__}", (kind,), {name: noting(name) for name in names})
    return made


class Net(nn.Sequential):
    """Any small model."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))


def samples(number: int) -> dict[str, torch.Tensor]:
    """Inputs with as many classes as the model has."""
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": x[:, :3].argmax(1)}


def federation(mode: str, changes: dict[str, Any] | None = None) -> Any:
    """A training of one round with what is registered."""
    coala.register_model(Net)
    data = coala.FederatedTensorDataset(samples(40), num_of_clients=4)
    coala.register_dataset(data, coala.FederatedTensorDataset(samples(12), do_simulate=False))
    conf: dict[str, Any] = {
        "test_mode": mode,
        "server": {"rounds": 1, "clients_per_round": 2, "visualize": True},
        "client": {"local_epoch": 1, "local_test": True},
    }
    coala.init(conf=conf | (changes or {}))
    return coala.run()
