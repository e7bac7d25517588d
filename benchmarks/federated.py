"""A round of federated training beside a loop written by hand (= 1.0), for several cohorts.

    python benchmarks/federated.py [--cohorts 10,50,200] [--models cnn,resnet] [--executors
    serial,graph,stacked] [--runs 5]
                                   [--workers N] [--quick] [--name NAME]

1,000 clients hold 50 synthetic images of 32 x 32 x 3 each; a client trains one epoch of batches of
10 with SGD, and the updates are averaged (FedAvg). `cnn` is the network of pfl-research's CIFAR-10
benchmark, 1,626,442 parameters with dropout; `resnet` is ResNet-18 with GroupNorm, timed at a
cohort of 50. The loop by hand has one model, copies weights in place, updates with foreach
operations and sums into one buffer: as plain and as fast as a script without a framework is. All
take turns in one run; TF32 is
on for all of them. With --workers the contenders are ours only, on so many GPUs (or processes),
beside one worker.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from report import machine, save_json
from torch import nn

import allhands
from allhands.federated.algorithms import FedAvg, Server
from allhands.federated.clients import Clients
from allhands.federated.executors import ExecutorContext
from allhands.federated.federated_training import make_executor
from allhands.federated.local_training import LocalOptimizer, LocalTraining
from allhands.federated.rounds import Rounds
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.launch.spawn import spawn
from allhands.models import ResNet18

CLIENTS, IMAGES, BATCH, RATE, SEED = 1000, 50, 10, 0.1, 7
Data = tuple[torch.Tensor, torch.Tensor]


class PflCNN(nn.Module):
    """The network of pfl-research's CIFAR-10 benchmark: N x 3 x 32 x 32 to N x 10."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25 * dropout), nn.Dropout(0.5 * dropout)
        self.dense, self.head = nn.Linear(64 * 14 * 14, 128), nn.Linear(128, 10)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        return self.head(self.drop2(self.dense(self.drop1(x.flatten(1))).relu()))


def build(name: str, dropout: bool = True) -> nn.Module:
    """A model with the same weights at every call."""
    torch.manual_seed(SEED)
    return PflCNN(dropout) if name == "cnn" else ResNet18(norm="group")


def data(device: torch.device, clients: int) -> Data:
    """Images and labels of all clients."""
    drawn = torch.Generator().manual_seed(SEED)
    images = torch.randn(clients * IMAGES, 3, 32, 32, generator=drawn)
    labels = torch.randint(10, (clients * IMAGES,), generator=drawn)
    return images.to(device), labels.to(device)


def ours(
    name: str,
    executor: Any,
    given: tuple[torch.Tensor, torch.Tensor],
    cohort: int,
    world: Any,
    dropout: bool = True,
) -> Rounds:
    """Our rounds, ready to run."""
    device = given[0].device
    model = build(name, dropout).to(device)
    local = LocalTraining(
        nn.CrossEntropyLoss(),
        LocalOptimizer.like(torch.optim.SGD(model.parameters(), lr=RATE), model),
        BATCH,
    )
    layout = RowLayout(model, local.optimizer.groups)
    count = len(given[0]) // IMAGES
    server = Server(layout, layout.read(model), layout.read_integers(model), device, count, SEED)
    clients = Clients([range(i * IMAGES, (i + 1) * IMAGES) for i in range(count)])
    work = ExecutorContext(model, local, FedAvg(), Samples(given, device), clients, SEED)
    return Rounds(
        work, server, make_executor(executor, work, server), world, per_round=cohort, rounds=1 << 30
    )


class ByHand:
    """The loop that a researcher would write: cohort, orders and batches as `Rounds` draws them,
    everything else by hand."""

    def __init__(
        self,
        name: str,
        given: tuple[torch.Tensor, torch.Tensor],
        cohort: int,
        world: Any,
        dropout: bool = True,
    ) -> None:
        self.plan = ours(name, "serial", given, cohort, world, dropout)
        self.images, self.labels = given
        self.model = build(name, dropout).to(self.images.device).train()
        self.weights = list(self.model.parameters())
        self.start = [weight.detach().clone() for weight in self.weights]
        self.sums = [torch.zeros_like(weight) for weight in self.start]
        self.round = 0

    def one_round(self) -> None:
        """Train a cohort, average, and wait for the device."""
        cohort = self.plan.select(self.round)
        torch._foreach_zero_(self.sums)
        with torch.no_grad():
            weights = [weight.detach() for weight in self.weights]
        for client in cohort:
            torch._foreach_copy_(weights, self.start)
            indices = self.plan.clients.samples(client)
            for batch in self.plan.work.local.batches(indices, SEED, self.round, client):
                wanted = batch.to(self.images.device)
                loss = nn.functional.cross_entropy(
                    self.model(self.images[wanted]), self.labels[wanted]
                )
                gradients = torch.autograd.grad(loss, self.weights)
                torch._foreach_add_(weights, list(gradients), alpha=-RATE)
            torch._foreach_add_(self.sums, weights)
        torch._foreach_copy_(self.start, torch._foreach_div(self.sums, float(len(cohort))))
        self.round += 1
        if self.images.is_cuda:
            torch.cuda.synchronize()

    def row(self) -> torch.Tensor:
        """The global model as one row."""
        with torch.no_grad():
            for weight, value in zip(self.weights, self.start, strict=True):
                weight.copy_(value)
        return self.plan.server.layout.read(self.model)


@contextmanager
def exact_products() -> Iterator[None]:
    """Products in float32 and not in TF32."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def error(name: str, executor: Any, given: Data, cohort: int, world: Any) -> float:
    """The norm of the difference from the loop by hand after one round without dropout and TF32,
    relative to the weights'."""
    with exact_products():
        hand, made = (
            ByHand(name, given, cohort, world, False),
            ours(name, executor, given, cohort, world, False),
        )
        hand.one_round()
        made.one_round()
    return float((hand.row() - made.server.weights).norm() / made.server.weights.norm())


def measure(contenders: dict[str, Callable[[], Any]], runs: int) -> dict[str, dict[str, float]]:
    """Milliseconds a round of each, in turn: the median, the least and the most, after two rounds
    of warming up."""
    made = {name: make() for name, make in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for run in range(runs + 2):
        for name, one in made.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            one.one_round()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if run > 1:
                times[name].append(1000 * (time.perf_counter() - began))
    return {
        name: {"median": statistics.median(t), "least": min(t), "most": max(t)}
        for name, t in times.items()
    }


def beside_the_loop(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a model, cohort and executor, on one device."""
    world = allhands.init()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    given, rows = data(world.device, args.clients), []
    for name in args.models:
        for cohort in (
            args.cohorts
            if name == "cnn"
            else [c for c in args.cohorts if c == 50] or [args.cohorts[0]]
        ):
            contenders: dict[str, Callable[[], Any]] = {
                "loop": lambda name=name, cohort=cohort: ByHand(name, given, cohort, world)
            }
            for executor in args.executors:
                contenders[executor] = lambda name=name, executor=executor, cohort=cohort: ours(
                    name, parsed(executor), given, cohort, world
                )
            measured = measure(contenders, args.runs)
            for who, value in measured.items():
                row = {
                    "model": name,
                    "cohort": cohort,
                    "contender": who,
                    "milliseconds": value,
                    "times_the_loop": measured["loop"]["median"] / value["median"],
                }
                if who != "loop":
                    row["error"] = error(name, parsed(who), given, min(cohort, 10), world)
                if torch.cuda.is_available():
                    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                rows.append(row)
                print(
                    f"{name} {cohort:4d} {who:24s} {value['median']:9.2f} ms  "
                    f"{row['times_the_loop']:6.2f} x  error {row.get('error', 0.0):.1e}",
                    flush=True,
                )
    return rows


def parsed(executor: str) -> Any:
    """``stacked:chunk=50:compile=true`` as the options of `Federated`."""
    name, *options = executor.split(":")
    if not options:
        return name
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        values[key] = value == "true" if value in ("true", "false") else int(value)
    return {"name": name, **values}


def _scaled(args: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a round on this world; in a worker."""
    world = allhands.init()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    given = data(world.device, args["clients"])
    return measure(
        {"ours": lambda: ours("cnn", args["executor"], given, args["cohort"], world)}, args["runs"]
    )["ours"]


def over_devices(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a number of workers: the same cohort on 1 and on more devices."""
    rows: list[dict[str, Any]] = []
    for executor in args.executors:
        given = {
            "clients": args.clients,
            "executor": parsed(executor),
            "cohort": max(args.cohorts),
            "runs": args.runs,
        }
        for workers in dict.fromkeys((1, *args.workers)):
            value = spawn(_scaled, (given,), workers=workers)[0]
            one = rows[-1]["one"] if workers != 1 else value["median"]
            rows.append(
                {
                    "executor": executor,
                    "cohort": given["cohort"],
                    "workers": workers,
                    "milliseconds": value,
                    "one": one,
                    "efficiency": one / value["median"] / workers,
                }
            )
            print(
                f"{executor} on {workers}: {value['median']:.2f} ms, efficiency "
                f"{rows[-1]['efficiency']:.2f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohorts", default="10,50,200")
    parser.add_argument("--models", default="cnn,resnet")
    parser.add_argument(
        "--executors",
        default="serial,graph,stacked" if torch.cuda.is_available() else "serial,stacked",
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--workers", default="")
    parser.add_argument(
        "--quick", action="store_true", help="a few clients, to see that the script works"
    )
    parser.add_argument("--name", default="federated", help="of the file of results")
    args = parser.parse_args()
    args.cohorts = [4] if args.quick else [int(cohort) for cohort in args.cohorts.split(",")]
    args.runs, args.clients = (1, 20) if args.quick else (args.runs, args.clients)
    args.models, args.executors = args.models.split(","), args.executors.split(",")
    args.workers = [int(number) for number in args.workers.split(",") if number]
    rows = over_devices(args) if args.workers else beside_the_loop(args)
    if not args.quick:
        save_json(args.name, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
