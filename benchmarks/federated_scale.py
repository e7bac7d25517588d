"""A round of 1,000 clients out of 1,000, 10,000 and 100,000: seconds, and the memory that the
process holds at its peak.

    python benchmarks/federated_scale.py [--rounds 5]

Each client has 10 samples of 32 numbers and trains logistic regression for one epoch in batches of
5. Every size runs in a process of its own on one thread, so that the peaks do not mix. What is
asked: a round takes as long however many clients there are, and 100,000 stay within 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from report import machine, save_json

COHORT, SAMPLES, FEATURES = 1000, 10, 32


def one(clients: int, rounds: int) -> dict[str, Any]:
    """The figures of one size, in this process."""
    import torch
    from torch import nn

    import allhands
    from allhands.federated.algorithms import FedAvg, Server
    from allhands.federated.executors import ExecutorContext
    from allhands.federated.federated_training import make_executor
    from allhands.federated.local_training import LocalOptimizer, LocalTraining
    from allhands.federated.partitions import iid
    from allhands.federated.rounds import Rounds
    from allhands.federated.row_layout import RowLayout
    from allhands.federated.samples import Samples

    world = allhands.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.perf_counter()
    data = torch.randn(clients * SAMPLES, FEATURES), torch.randint(2, (clients * SAMPLES,))
    model = nn.Linear(FEATURES, 2)
    local = LocalTraining(
        nn.CrossEntropyLoss(),
        LocalOptimizer.like(torch.optim.SGD(model.parameters(), lr=0.1), model),
        5,
    )
    layout = RowLayout(model)
    server = Server(
        layout, layout.read(model), layout.read_integers(model), world.device, clients, 0
    )
    work = ExecutorContext(
        model, local, FedAvg(), Samples(data, world.device), iid(clients * SAMPLES, clients), 0
    )
    made = Rounds(
        work, server, make_executor("serial", work, server), world, per_round=COHORT, rounds=1 << 30
    )
    made.one_round()
    start = time.perf_counter() - began
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        made.one_round()
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "clients": clients,
        "seconds_a_round": statistics.median(times),
        "seconds_to_start": start,
        "peak_gib": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.rounds)))
        return
    rows = []
    for clients in (1_000, 10_000, 100_000):
        command = [sys.executable, __file__, "--one", str(clients), "--rounds", str(args.rounds)]
        rows.append(
            json.loads(
                subprocess.run(
                    command, check=True, capture_output=True, text=True
                ).stdout.splitlines()[-1]
            )
        )
        print(rows[-1], flush=True)
    save_json("federated_scale", {"machine": machine(), "cohort": COHORT, "rows": rows})


if __name__ == "__main__":
    main()
