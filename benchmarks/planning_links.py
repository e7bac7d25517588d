"""Step times that `allhands plan` predicts for links, beside trainings over such links: two workers
with a core each, on hosts made of network namespaces, whose interfaces are shaped by `tc`.

    python benchmarks/planning_links.py     # needs what tests/cluster/README.md says

For each speed of the link: `allhands doctor --profile` measures collectives, both hosts time
operations at once (the cores share memory and its bandwidth), the plan predicts, and the trainings
run; predictions and measurements alternate, as often as `--turns` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
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
from allhands import DDP, FSDP, LocalSGD, Pipeline, SupervisedRunner
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate
from allhands.planning.machines import CARDS, CPU
from allhands.planning.measured_links import read_links
from allhands.planning.operation_times import OperationTimes, write_times
from allhands.planning.plan import plan
from allhands.strategies import Strategy

SPEEDS = {"100 Mbit/s": 100, "1 Gbit/s": 1000, "10 Gbit/s": 10000}
SIZES = {"vocab_size": 256, "block_size": 64, "layers": 4, "heads": 4, "width": 128}
SAMPLES, EVERY, STEPS, WARM = 16, 8, 16, 4
STRATEGIES = ("ddp", "fsdp", "pipeline", "local_sgd")
# The cases that are shown: the model's name and the strategy's.
CASES = [("gpt", name) for name in STRATEGIES] + [("conv", "ddp"), ("conv", "local_sgd")]


def strategy_named(name: str) -> Strategy:
    made: dict[str, Strategy] = {
        "ddp": DDP(),
        "fsdp": FSDP(),
        "pipeline": Pipeline(),
        "local_sgd": LocalSGD(every=EVERY),
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


def work() -> None:
    """What each worker of a training does: prints rank 0's times."""
    world = allhands.init(device="cpu")
    found = {f"{model}, {name}": train(model, name) for model, name in CASES}
    if world.rank == 0:
        print("TIMES " + json.dumps(found), flush=True)
    allhands.finalize()


def at_once(profile: Path, model: str) -> None:
    """Wait for the other host: what shares memory with a step then is the same step."""
    (profile.parent / f"ready {model} {os.uname().nodename}").touch()
    while len(list(profile.parent.glob(f"ready {model} *"))) < 2:
        time.sleep(1e-3)


def predict(profile: Path) -> None:
    """Time operations here, and print what the plan says with the profile's links."""
    links = read_links(profile)
    assert links is not None
    times = OperationTimes(CARDS[CPU], device=torch.device("cpu"))
    found = {}
    for model in ("gpt", "conv"):
        names = [name for one, name in CASES if one == model]
        given = parts(model, 1)
        inputs, targets = given.pop("data").tensors
        at_once(profile, model)
        rows = plan(
            **given,
            batch=(inputs[:SAMPLES], targets[:SAMPLES]),
            gpus=2,
            per_host=1,
            card=CPU,
            link=links,
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


def run(hosts: Hosts, *words: str) -> Any:
    """The times that a command has printed."""
    done = subprocess.run(
        words,
        check=False,
        cwd=Path(__file__).parent,
        env=hosts.environ(OMP_NUM_THREADS="1"),
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


def turn(hosts: Hosts) -> dict[str, Any]:
    """One profile, prediction and measurement."""
    profile = hosts.folder / "profile.json"
    for old in (profile, *hosts.folder.glob("ready *")):
        old.unlink(missing_ok=True)
    doctor = [*command(), "doctor", "-H", "d1,d2", "--profile", str(profile)]
    environment = hosts.environ(OMP_NUM_THREADS="1")
    subprocess.run(doctor, check=True, env=environment, cwd="/", stdout=subprocess.DEVNULL)
    other = hosts.folder / "other.json"
    other.write_text(profile.read_text())
    script = f"cd {Path(__file__).parent} && OMP_NUM_THREADS=1 {sys.executable} planning_links.py"
    busy = subprocess.Popen(
        ["ssh", "d2", f"{script} --predict {other}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    predicted = run(hosts, "ssh", "d1", f"{script} --predict {profile}")
    busy.wait()
    launch = [*command(), "launch", "-H", "d1,d2", "-n", "2", "--no-prefix"]
    measured = run(hosts, *launch, "planning_links.py", "--work")
    kinds = json.loads(profile.read_text())["links"]["between"]["kinds"]
    return {"predicted": predicted, "measured": measured, "links": kinds}


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case the medians in ms, and predicted over measured."""
    rows = {}
    for model, name in CASES:
        key = f"{model}, {name}"
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
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--speeds", nargs="*", default=list(SPEEDS), choices=list(SPEEDS))
    parser.add_argument("--out", default="planning_links")
    given = parser.parse_args()
    if given.work:
        return work()
    if given.predict is not None:
        return predict(given.predict)
    path = RESULTS / f"{given.out}.json"
    before = json.loads(path.read_text())["speeds"] if path.exists() else {}
    found: dict[str, Any] = {speed: before[speed] for speed in SPEEDS if speed in before}
    for speed in given.speeds:
        with Hosts(("d1", "d2"), label=f"links-{os.getpid()}") as hosts:
            shape(hosts, SPEEDS[speed])
            turns = [turn(hosts) for _ in range(given.turns)]
        found[speed] = {"cases": summary(turns), "links": turns[-1]["links"]}
        for name, row in found[speed]["cases"].items():
            print(f"{speed:10s} {name:16s}", *(f"{k} {v}" for k, v in row.items()), flush=True)
        save_json(given.out, {"machine": machine(), "speeds": found}, quiet=True)
    return None


if __name__ == "__main__":
    main()
