"""The clients and the server of `federated_peers.py` for Flower's simulation.

A module of its own, which Ray's actors import: what lies in a script's `__main__` would be sent to
them with every message, and data that a process keeps would be made anew for each client. So each
process keeps its model and the data.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from federated_peers import BATCH, CLIENTS, IMAGES, RATE, SEED, build, data
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

_data = functools.cache(data)
_build = functools.cache(build)


def train(message: Message, context: Context) -> Message:
    """One epoch of a client."""
    torch.set_num_threads(1)
    net = _build(message.content["config"]["model"]).train()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    images, labels = (part[client * IMAGES : (client + 1) * IMAGES] for part in _data())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for batch in torch.randperm(IMAGES).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": IMAGES}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def simulate(args: dict[str, Any], warm: int) -> list[float]:
    """Seconds of each round, two actors of one processor each."""
    from flwr.simulation import run_simulation

    clients, server, ends = ClientApp(), ServerApp(), list[float]()
    clients.train()(train)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(SEED)
        strategy = FedAvg(
            fraction_train=args["cohort"] / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=args["cohort"],
            min_evaluate_nodes=0,
            min_available_nodes=CLIENTS,
        )
        strategy.start(
            grid,
            ArrayRecord(build(args["model"]).state_dict()),
            num_rounds=args["rounds"] + warm,
            train_config=ConfigRecord({"model": args["model"]}),
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False},
    }
    run_simulation(server, clients, CLIENTS, backend_config=resources)
    return [end - begin for begin, end in zip(ends[warm:], ends[warm + 1 :], strict=False)]
