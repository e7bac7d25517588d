"""Push plus pull through parameter servers beside gloo's all_reduce (= 1.0), training through
servers beside ddp, an idle server.

    python benchmarks/kvstore.py [--megabytes 100] [--runs 9] [--skip-training] [--mxnet PYTHON]

PYTHON is that of an environment with MXNet 1.9.1 (pip install mxnet==1.9.1 numpy==1.23.5), whose
own store is then timed beside.

Two workers push and pull one key of so many bytes, without an optimizer, through one server: over
shared memory and over TCP; "shared, buffer" is `pushpull` of the key's `KVStore.buffer` in place,
as the all-reduce is in place. The same two workers all-reduce as many bytes with gloo. "tcp, bytes
alone" sends as many bytes as the store over TCP, to processes that send them back and do nothing
else, which bounds what a server over TCP of one host can reach. All take turns in one run. Then
ResNet-18 on images of 32x32 with SGD and momentum, 16 images a worker and step: through one server
over shared memory, and with DistributedDataParallel on gloo. One thread a process.
Last, the CPU time of a server that has nothing to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import mxnet_peer
from plain_tcp import PlainTcp, relays
from report import machine, save_json

import allhands
from allhands.launch.spawn import spawn

WORKERS = 2


def exchange(
    megabytes: int, runs: int, transports: list[str], ports: list[int]
) -> dict[str, list[float]]:
    """Seconds of each call, by contender; in a worker."""
    import torch
    import torch.distributed as dist

    from allhands.kvstore.served import ServedStore
    from allhands.kvstore.store_modes import mode_named
    from allhands.kvstore.wire_frames import raw

    world = allhands.init(device="cpu")
    torch.set_num_threads(1)
    count = megabytes * 1_000_000 // 4
    stores = {}
    for name in transports:
        os.environ["ALLHANDS_KVSTORE_TRANSPORT"] = name
        stores[name] = ServedStore.connect(mode_named("dist"), {})
        stores[name].init("key", torch.zeros(count))
    value, out = torch.full((count,), 1.0 + world.rank), torch.empty(count)
    buffer = stores["shared"].buffer("key")
    alone = PlainTcp(ports, world.rank, value.nbytes)
    samples: dict[str, list[float]] = {
        "gloo all_reduce": [],
        **{name: [] for name in transports},
        "shared, buffer": [],
        "tcp, bytes alone": [],
    }
    for run in range(runs + 2):
        for name, times in samples.items():
            summed = buffer.copy_(value) if name == "shared, buffer" else value.clone()
            dist.barrier()
            began = time.perf_counter()
            if name == "gloo all_reduce":
                dist.all_reduce(summed)
            elif name == "shared, buffer":
                stores["shared"].pushpull("key", summed)
            elif name == "tcp, bytes alone":
                alone.exchange(raw(summed), raw(out))
            else:
                stores[name].pushpull("key", summed, out)
                summed = out
            seconds = time.perf_counter() - began
            if name == "tcp, bytes alone":
                assert torch.equal(out, value)
            else:
                assert summed[0] == 3.0
                assert summed[-1] == 3.0
            if run > 1:
                times.append(seconds)
    for store in stores.values():
        store.close()
    alone.close()
    return samples


def training(steps: int, batch: int) -> dict[str, list[float]]:
    """Seconds of a step through servers and with ddp, in turn; in a worker."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from allhands import kvstore
    from allhands.models import resnet18

    world = allhands.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    through, beside = resnet18(num_classes=10), resnet18(num_classes=10)
    store = kvstore.create("dist")
    trainer = kvstore.Trainer(through, "sgd", {"lr": 0.01, "momentum": 0.9}, kvstore=store)
    ddp = DistributedDataParallel(beside, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    summed, mean = torch.nn.CrossEntropyLoss(reduction="sum"), torch.nn.CrossEntropyLoss()
    samples: dict[str, list[float]] = {"ddp on gloo": [], "server": []}
    for step in range(steps + 2):
        for name, times in samples.items():
            dist.barrier()
            began = time.perf_counter()
            if name == "server":
                summed(through(images), labels).backward()
                trainer.step(batch)
            else:
                mean(ddp(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step > 1:
                times.append(time.perf_counter() - began)
    store.close()
    return samples if world.rank == 0 else {}


def idle(seconds: float) -> float:
    """CPU seconds of a server a second while its worker does nothing; in a worker."""
    import json

    from torch.distributed import TCPStore

    from allhands import kvstore
    from allhands.kvstore.credentials import key

    store = kvstore.create("dist")
    jobs = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    pid = json.loads(jobs.get(key(0)))["pid"]

    def used() -> float:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(seconds)
    share = (used() - before) / seconds
    store.close()
    return share


def told(samples: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Medians and ratios to `base` (larger is faster)."""
    middle = {name: statistics.median(times) for name, times in samples.items()}
    best = {name: min(times) for name, times in samples.items()}
    return {
        name: {
            "median_s": round(middle[name], 4),
            "best_s": round(best[name], 4),
            "times_as_fast": round(middle[base] / middle[name], 2),
            "times_as_fast_best": round(best[base] / best[name], 2),
        }
        for name in samples
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mxnet", metavar="PYTHON")
    parser.add_argument("--skip-training", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, Any] = {
        "megabytes": options.megabytes,
        "workers": WORKERS,
        "runs": options.runs,
    }
    for servers in options.servers:
        with relays(servers, WORKERS) as ports:
            samples = spawn(
                exchange,
                (options.megabytes, options.runs, ["shared", "tcp"], ports),
                workers=WORKERS,
                servers=servers,
                threads=1,
            )
        # A call is over when the slower worker has its result.
        slower = {
            name: [max(both) for both in zip(*(one[name] for one in samples), strict=True)]
            for name in samples[0]
        }
        if options.mxnet:
            count = options.megabytes * 1_000_000 // 4
            slower["MXNet dist_sync"] = mxnet_peer.pushpull(
                options.mxnet, count, options.runs, WORKERS, servers
            )
        results[f"pushpull, {servers} server(s)"] = told(slower, "gloo all_reduce")
        print(
            f"pushpull, {servers} server(s)", results[f"pushpull, {servers} server(s)"], flush=True
        )
    if not options.skip_training:
        steps = spawn(training, (8, 16), workers=WORKERS, servers=1, threads=1)[0]
        results["ResNet-18 step"] = told(steps, "ddp on gloo")
        print("ResNet-18 step", results["ResNet-18 step"], flush=True)
    (results["idle server, share of a core"],) = spawn(idle, (5.0,), workers=1, servers=1)
    print("idle server:", results["idle server, share of a core"])
    save_json("kvstore", {**results, **machine()})


if __name__ == "__main__":
    main()
