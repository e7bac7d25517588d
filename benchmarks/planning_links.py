"""Step times that `allhands plan` predicts for links, beside trainings over such links: two workers
with a core each, on hosts made of network namespaces, whose interfaces are shaped by `tc`.

    python benchmarks/planning_links.py     # needs what tests/cluster/README.md says

A parameter server is on the first worker's host; `loopback` has all three on this machine.

For each speed of the link: `allhands doctor --profile` measures collectives, both hosts time
operations at once (the cores share memory and its bandwidth), the plan predicts, and the trainings
run; predictions and measurements alternate, as often as `--turns` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import RESULTS, machine, save_json
from tests.cluster.hosts import Hosts
from tests.cluster.launching import allhands as command
from tests.cluster.machine import call
from torch import nn
from torch.utils.data import TensorDataset

import allhands
from allhands import DDP, FSDP, KVStore, LocalSGD, Pipeline, SupervisedRunner
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.machines import CARDS, CPU
from allhands.planning.measured_profile import MeasuredProfile, write_times
from allhands.planning.operation_times import OperationTimes
from allhands.planning.plan import plan
from allhands.strategies import Strategy

LOOPBACK = "loopback"
SPEEDS = {"100 Mbit/s": 100, "1 Gbit/s": 1000, "10 Gbit/s": 10000, LOOPBACK: 0}
SIZES = {"vocab_size": 256, "block_size": 64, "layers": 4, "heads": 4, "width": 128}
SAMPLES, EVERY, STEPS, WARM = 16, 8, 16, 4
STRATEGIES = ("ddp", "fsdp", "pipeline", "local_sgd")
SERVED = ("kvstore", "kvstore async")
# The cases that are shown: the model's name and the strategy's.
CASES = [("gpt", name) for name in STRATEGIES] + [("conv", "ddp"), ("conv", "local_sgd")]
WITH_SERVER = [(model, name) for model in ("gpt", "conv") for name in SERVED]


def cases_of(speed: str, only: list[str]) -> list[tuple[str, str]]:
    """On one machine, whose links are no matter of `tc`, those of a parameter server alone."""
    cases = [*(CASES if SPEEDS[speed] else ()), *WITH_SERVER]
    return [case for case in cases if case[1] in only]


def strategy_named(name: str) -> Strategy:
    made: dict[str, Strategy] = {
        "ddp": DDP(),
        "fsdp": FSDP(),
        "pipeline": Pipeline(),
        "local_sgd": LocalSGD(every=EVERY),
        "kvstore": KVStore(servers=1),
        "kvstore async": KVStore("async", servers=1),
    }
    return made[name]


def parts(model: str, steps: int) -> dict[str, Any]:
    """What is trained, and data for so many steps of two workers."""
    torch.manual_seed(0)
    count = 2 * SAMPLES * steps
    if model == "gpt":
        tokens = torch.randint(256, (count, SIZES["block_size"] + 1))
        net: nn.Module = GPT(**SIZES, tied=False)
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        criterion: nn.Module = NextToken()
    else:
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128 * 64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        data = TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(10, (count,)))
        criterion = nn.CrossEntropyLoss()
    return {
        "model": net,
        "criterion": criterion,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-3),
        "data": data,
    }


class StepTimes(allhands.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, training: Any) -> None:
        self.ends.append(time.perf_counter())


def train(model: str, name: str) -> float:
    """Seconds of a step in this world: the median; of steps that differ, of their periods."""
    given = parts(model, WARM + STEPS + 1)
    steps = StepTimes()
    SupervisedRunner(device="cpu").train(
        model=given["model"],
        criterion=given["criterion"],
        optimizer=given["optimizer"],
        datasets={"batch_size": SAMPLES, "train": given["data"]},
        distributed=strategy_named(name),
        callbacks=[steps],
        max_steps=WARM + STEPS,
    )
    period = EVERY if name == "local_sgd" else 1
    ends = steps.ends[WARM - 1 :: period]
    return statistics.median((end - begin) / period for begin, end in itertools.pairwise(ends))


def work(cases: list[tuple[str, str]]) -> None:
    """What each worker of a training does: prints the times of the slowest rank."""
    world = allhands.init(device="cpu")
    found = {f"{model}, {name}": train(model, name) for model, name in cases}
    every: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(every, found)
    if world.rank == 0:
        slowest = {key: max(one[key] for one in every) for key in found}
        print("TIMES " + json.dumps(slowest), flush=True)
    allhands.finalize()


def at_once(profile: Path, model: str) -> None:
    """Wait for the other host: what shares memory with a step then is the same step."""
    (profile.parent / f"ready {model} {secrets.token_hex(8)}").touch()
    while len(list(profile.parent.glob(f"ready {model} *"))) < 2:
        time.sleep(1e-3)


def predict(profile: Path, speed: str, only: list[str], beside: bool) -> None:
    """Time operations here, and print what the plan says with the profile's links.

    Args:
        beside: this is the other host, which has no parameter server.
    """
    links = MeasuredProfile(profile).links() if SPEEDS[speed] else None
    times = OperationTimes(CARDS[CPU], device=torch.device("cpu"))
    found = {}
    for model in ("gpt", "conv"):
        names = [name for one, name in cases_of(speed, only) if one == model]
        if beside:
            names = [name for name in names if name not in SERVED] or ["local_sgd"]
        given = parts(model, 1)
        inputs, targets = given.pop("data").tensors
        at_once(profile, model)
        rows = plan(
            **given,
            batch=(inputs[:SAMPLES], targets[:SAMPLES]),
            gpus=2,
            per_host=1 if SPEEDS[speed] else 2,
            card=CPU,
            link=links or "pcie",  # nothing goes over it there
            strategies=[Candidate(strategy_named(name), {"name": name}) for name in names],
            times=times,
        ).rows
        for row in rows:
            if row.seconds is None:
                raise SystemExit(f"{row.name}: {row.refused}")
            found[f"{model}, {row.name}"] = {
                part: getattr(row.seconds, part)
                for part in ("total", "compute", "waiting", "bubble")
            }
    write_times(profile, times)
    print("TIMES " + json.dumps(found), flush=True)


def run(environ: dict[str, str], *words: str) -> Any:
    """The times that a command has printed."""
    done = subprocess.run(
        words,
        check=False,
        cwd=Path(__file__).parent,
        env=environ,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if "TIMES " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[0].partition("TIMES ")[2])


def shape(hosts: Hosts, megabits: int) -> None:
    """What each host sends goes at this rate; a millisecond of it may go at once."""
    burst = str(max(32_000, megabits * 1000 // 8))
    words = ["root", "tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "200ms"]
    for name in hosts.names:
        call("tc", "qdisc", "replace", "dev", f"{hosts.bridge}-{hosts.names.index(name)}", *words)
        hosts.run(name, "tc", "qdisc", "replace", "dev", "eth0", *words)


def turn(folder: Path, hosts: Hosts | None, speed: str, only: list[str]) -> dict[str, Any]:
    """One profile, prediction and measurement."""
    profile, other = folder / "profile.json", folder / "other.json"
    for old in (profile, other, *folder.glob("ready *")):
        old.unlink(missing_ok=True)
    threads = {"OMP_NUM_THREADS": "1"}
    environ = os.environ | threads if hosts is None else hosts.environ(**threads)
    on_hosts = [] if hosts is None else ["-H", "d1,d2"]
    kinds = {}
    if hosts is not None:
        doctor = [*command(), "doctor", *on_hosts, "--profile", str(profile)]
        subprocess.run(doctor, check=True, env=environ, cwd="/", stdout=subprocess.DEVNULL)
        other.write_text(profile.read_text())
        kinds = json.loads(profile.read_text())["links"]["between"]["kinds"]

    common = ["--speeds", speed, "--only", *only]

    def predicting(host: str, path: Path, *options: str) -> list[str]:
        words = [sys.executable, str(Path(__file__).absolute()), *common]
        words += ["--predict", str(path), *options]
        there = f"cd {Path(__file__).absolute().parent} && OMP_NUM_THREADS=1 {shlex.join(words)}"
        return words if hosts is None else ["ssh", host, there]

    busy = subprocess.Popen(
        predicting("d2", other, "--beside"),
        env=environ,
        cwd=Path(__file__).parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    predicted = run(environ, *predicting("d1", profile))
    busy.wait()
    launch = [*command(), "launch", *on_hosts, "-n", "2", "--no-prefix"]
    script = ["planning_links.py", *common, "--work"]
    measured = {}
    for kind, server in (("servers", ["-s", "1"]), ("alone", [])):
        if any((case in WITH_SERVER) == bool(server) for case in cases_of(speed, only)):
            measured |= run(environ, *launch, *server, *script, kind)
    return {"predicted": predicted, "measured": measured, "links": kinds}


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case the medians in ms, and predicted over measured."""
    rows = {}
    for key in turns[0]["measured"]:
        measured = statistics.median(one["measured"][key] for one in turns)
        parts = {
            part: statistics.median(one["predicted"][key][part] for one in turns)
            for part in turns[0]["predicted"][key]
        }
        rows[key] = {
            "predicted ms": round(1e3 * parts.pop("total"), 2),
            "measured ms": round(1e3 * measured, 2),
            "measured all": [round(1e3 * one["measured"][key], 2) for one in turns],
            "predicted all": [round(1e3 * one["predicted"][key]["total"], 2) for one in turns],
            **{f"{part} ms": round(1e3 * value, 2) for part, value in parts.items()},
        }
        rows[key]["of it"] = round(rows[key]["predicted ms"] / rows[key]["measured ms"], 4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["servers", "alone"], help=argparse.SUPPRESS)
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--speeds", nargs="*", default=list(SPEEDS), choices=list(SPEEDS))
    names = [*STRATEGIES, *SERVED]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="strategies")
    parser.add_argument("--out", default="planning_links")
    given = parser.parse_args()
    if given.work:
        served = given.work == "servers"
        cases = cases_of(given.speeds[0], given.only)
        return work([case for case in cases if (case in WITH_SERVER) == served])
    if given.predict is not None:
        return predict(given.predict, given.speeds[0], given.only, given.beside)
    path = RESULTS / f"{given.out}.json"
    before = json.loads(path.read_text())["speeds"] if path.exists() else {}
    found: dict[str, Any] = {speed: before[speed] for speed in SPEEDS if speed in before}
    for speed in given.speeds:
        if SPEEDS[speed]:
            with Hosts(("d1", "d2"), label=f"links-{os.getpid()}") as hosts:
                shape(hosts, SPEEDS[speed])
                turns = [turn(hosts.folder, hosts, speed, given.only) for _ in range(given.turns)]
        else:
            with tempfile.TemporaryDirectory() as folder:
                turns = [turn(Path(folder), None, speed, given.only) for _ in range(given.turns)]
        rows = summary(turns)
        old = found.get(speed, {"cases": {}})["cases"]
        found[speed] = {"cases": old | rows, "links": turns[-1]["links"]}
        for name, row in rows.items():
            print(f"{speed:10s} {name:16s}", *(f"{k} {v}" for k, v in row.items()), flush=True)
        save_json(given.out, {"machine": machine(), "speeds": found}, quiet=True)
    return None


if __name__ == "__main__":
    main()
