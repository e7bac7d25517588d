"""Rounds of federated training on two cores, ours (2 workers) beside pfl-research (2 processes) and
Flower's simulation (2 actors of Ray), in turns of one run.

    python3 -m venv /tmp/pfl && /tmp/pfl/bin/pip install torch==2.13.0 pfl==0.6.0
    python3 -m venv /tmp/flwr && /tmp/flwr/bin/pip install torch==2.13.0 "flwr[simulation]==1.42.0"
    python benchmarks/federated_peers.py --pfl /tmp/pfl/bin/python --flwr /tmp/flwr/bin/python \
        [--cohorts 10,50] [--models cnn,lr] [--rounds 3] [--turns 2]

100 clients hold 50 synthetic images of 32 x 32 x 3 each; a client trains one epoch of batches of 10
with SGD, and the models are averaged by samples (FedAvg), without evaluation. `cnn` is the network
of pfl-research's CIFAR-10 benchmark, `lr` logistic regression, where what a simulator adds is
nearly all. In every turn each contender starts its processes, of one thread each, trains two rounds
that do not count, and then those that do; all use torch of the same version. Let the machine be
idle; where it is not, the quotients of a turn, whose contenders run within minutes of each other,
say more than the times.

BlazeFL 3.0 is not in it: it asks for Python 3.14.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

CLIENTS, IMAGES, BATCH, RATE, SEED, WARM = 100, 50, 10, 0.1, 7, 2
Data = tuple[torch.Tensor, torch.Tensor]


def build(name: str) -> nn.Sequential:
    """A model with the same weights at every call: N x 3 x 32 x 32 to N x 10."""
    torch.manual_seed(SEED)
    if name == "lr":
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def data() -> Data:
    """Images and labels of all clients."""
    drawn = torch.Generator().manual_seed(SEED)
    return torch.randn(CLIENTS * IMAGES, 3, 32, 32, generator=drawn), torch.randint(
        10, (CLIENTS * IMAGES,), generator=drawn
    )


def _ours(args: dict[str, Any]) -> list[float]:
    """Seconds of each round of ours; in a worker."""
    import allhands
    from allhands.federated.algorithms import FedAvg, Server
    from allhands.federated.clients import Clients
    from allhands.federated.executors import ExecutorContext
    from allhands.federated.federated_training import make_executor
    from allhands.federated.local_training import LocalOptimizer, LocalTraining
    from allhands.federated.rounds import Rounds
    from allhands.federated.row_layout import RowLayout
    from allhands.federated.samples import Samples

    torch.set_num_threads(1)
    world, model = allhands.init(device="cpu"), build(args["model"])
    optimizer = LocalOptimizer.like(torch.optim.SGD(model.parameters(), lr=RATE), model)
    local = LocalTraining(nn.CrossEntropyLoss(), optimizer, BATCH)
    layout = RowLayout(model, optimizer.groups)
    server = Server(
        layout, layout.read(model), layout.read_integers(model), world.device, CLIENTS, SEED
    )
    clients = Clients([range(i * IMAGES, (i + 1) * IMAGES) for i in range(CLIENTS)])
    work = ExecutorContext(model, local, FedAvg(), Samples(data(), world.device), clients, SEED)
    rounds = Rounds(
        work,
        server,
        make_executor("auto", work, server),
        world,
        per_round=args["cohort"],
        rounds=1 << 30,
    )
    for _ in range(args["rounds"] + WARM):
        rounds.one_round()
    return rounds.history["seconds"][WARM:]


def ours(args: dict[str, Any]) -> list[float]:
    """Seconds of each round of ours."""
    from allhands.launch.spawn import spawn

    return spawn(_ours, (args,), workers=2)[0]


def pfl(args: dict[str, Any]) -> list[float]:
    """Seconds of each round of pfl-research, in a process of torchrun's."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset, get_user_sampler
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(args["model"])

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    class Watch(TrainingProcessCallback):
        ends: list[float] = []  # noqa: RUF012 - one instance

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            self.ends.append(time.perf_counter())
            return False, Metrics()

    torch.set_num_threads(1)
    images, labels = (part.split(IMAGES) for part in data())
    users = [
        PyTorchTensorDataset((x, y), user_id=str(i))
        for i, (x, y) in enumerate(zip(images, labels, strict=True))
    ]
    federated = FederatedDataset(
        lambda user: users[user], get_user_sampler("random", list(range(CLIENTS)))
    )
    net, watch = Model(), Watch()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args["rounds"] + WARM,
            evaluation_frequency=1 << 30,
            train_cohort_size=args["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(federated, federated, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH
        ),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    return [
        end - begin for begin, end in zip(watch.ends[WARM - 1 :], watch.ends[WARM:], strict=False)
    ]


def flwr(args: dict[str, Any]) -> list[float]:
    """Seconds of each round of Flower's simulation."""
    from flower_peer import simulate

    return simulate(args, WARM)


def seconds(contender: str, python: str, args: dict[str, Any]) -> dict[str, Any]:
    """The times of one contender in processes of its own, and its versions."""
    command = (
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        if contender == "pfl"
        else [python]
    )
    # Flower and Ray would report to their makers, and ask whether there is something newer.
    settings = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Actors would stand back behind everything else that runs on the machine.
    settings["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [*command, __file__, "--contender", contender, "--task", json.dumps(args)],
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, **settings, "FLWR_HOME": home, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def contend(contender: str, args: dict[str, Any]) -> None:
    """Be one contender, and print its times."""
    import importlib.metadata

    times = {"ours": ours, "pfl": pfl, "flwr": flwr}[contender](args)
    if os.environ.get("RANK", "0") == "0":
        packages = {"ours": ["allhands"], "pfl": ["pfl"], "flwr": ["flwr", "ray"]}[contender]
        versions = {name: importlib.metadata.version(name) for name in ("torch", *packages)}
        print("RESULT " + json.dumps({"seconds": times, "versions": versions}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pfl", help="the interpreter of an environment with pfl")
    parser.add_argument("--flwr", help="the interpreter of an environment with flwr[simulation]")
    parser.add_argument("--cohorts", default="10,50")
    parser.add_argument("--models", default="cnn,lr")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--name", default="federated_peers", help="of the file of results")
    parser.add_argument(
        "--no-save", action="store_true", help="only print, to see that the script works"
    )
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        contend(args.contender, args.task)
        return
    from report import machine, save_json

    contenders = {
        "ours": sys.executable,
        **{name: getattr(args, name) for name in ("pfl", "flwr") if getattr(args, name)},
    }
    rows: list[dict[str, Any]] = []
    for model in args.models.split(","):
        for cohort in map(int, args.cohorts.split(",")):
            task = {"model": model, "cohort": cohort, "rounds": args.rounds}
            times: dict[str, list[list[float]]] = {name: [] for name in contenders}
            versions = {}
            for _ in range(args.turns):
                for name, python in contenders.items():
                    result = seconds(name, python, task)
                    times[name].append(result["seconds"])
                    versions[name] = result["versions"]
            for name, turns in times.items():
                values = [value for turn in turns for value in turn]
                slower = [
                    statistics.median(turn) / statistics.median(own)
                    for turn, own in zip(turns, times["ours"], strict=True)
                ]
                rows.append(
                    {
                        "model": model,
                        "cohort": cohort,
                        "contender": name,
                        "versions": versions[name],
                        "milliseconds": {
                            "median": 1e3 * statistics.median(values),
                            "least": 1e3 * min(values),
                            "most": 1e3 * max(values),
                        },
                        "times_ours": {"median": statistics.median(slower), "turns": slower},
                    }
                )
                print(
                    f"{model} {cohort:3d} {name:8s} {rows[-1]['milliseconds']['median']:9.2f} ms "
                    f"({rows[-1]['times_ours']['median']:.2f} times ours)",
                    flush=True,
                )
            if not args.no_save:  # what there is
                save_json(args.name, {"machine": machine(), "load": os.getloadavg(), "rows": rows})


if __name__ == "__main__":
    main()
