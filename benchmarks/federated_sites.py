"""Rounds across sites over loopback: ours beside a minimal Flower app, many sites, and the server's
memory.

    python benchmarks/federated_sites.py [--parts rounds,loading,fixed,many,memory,rest] [--turns 2]
        [--rounds 4] [--loading 2]

- ``rounds``: 4 sites and ResNet-18 (11.2 million parameters, 45 MB in float32); each site takes one
  step on 4 images. Ours and the app that Flower's quick start would give (`flower-superlink`, 4
  `flower-supernode`, `flwr run`) in turns of one run.
- ``loading``: the same with data that take `--loading` seconds to load: in Flower's app in the
  process of every message, which is where an app loads them; at our sites once. They sleep, so that
  loading takes no processor from anybody.
- ``fixed``: 4 sites with a tiny model, 10 rounds: what a round takes beyond training and transfer.
- ``many``: 10 sites with a tiny model, 3 rounds.
- ``memory``: the most memory that the server's two processes have had (resident set) with 2 and
  with 8 sites of the 45 MB model.
- ``rest``: the memory that they have while sites with a tiny model are connected and wait.

A round lasts from the end of the one before to its own end; the first of a turn does not count.
Ours saves a checkpoint in every round, Flower's app saves nothing. Both are insecure (plain text),
evaluate nothing, and give each process one thread. Every part is written to the result when it is
done, and the others in it stay. Let the machine be idle.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from report import RESULTS, machine, save_json

RATE, IMAGES, LIMIT = 0.01, 4, 900.0
RESNET: dict[str, Any] = {"name": "resnet18", "norm": "group"}
TINY: dict[str, Any] = {"name": "mlp", "in_features": 3072, "hidden": [], "out_features": 10}
ROLES = {
    "superlink": "allhands.federated.sites.superlink",
    "serverapp": "allhands.federated.sites.server_process",
}
QUIET = 10.0  # seconds until memory is looked at, in which nobody comes
BIN = Path(sys.executable).parent

DATA = '''
import time

import torch
from torch.utils.data import TensorDataset


def images(loading, flat, count):
    """Images of 3 x 32 x 32 and labels, which take so many seconds to load."""
    time.sleep(loading)
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 32, 32, generator=drawn)
    return TensorDataset(x.flatten(1) if flat else x, torch.randint(10, (count,), generator=drawn))
'''
OURS = (
    DATA
    + """

def load(root=None, **options):
    return {} if root is None else {"train": images(**options)}
"""
)
CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from allhands.models import build
from sites_app.data import images

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    config = context.run_config
    model = build(**MODEL)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = images(config["loading"], config["flat"], config["count"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["rate"])
    model.train()
    for x, y in DataLoader(data, batch_size=config["count"], shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(data)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""
SERVER = """
import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from allhands.models import build

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = build(**MODEL)

    def ended(round_, arrays):  # called after each round; it only writes down the time
        with open(config["times"], "a") as file:
            file.write(f"{time.time()}\\n")

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_evaluate_nodes=0,
                      min_train_nodes=config["sites"],
                      min_available_nodes=config["sites"])
    start = ArrayRecord(model.state_dict())
    strategy.start(grid, start, num_rounds=config["rounds"], evaluate_fn=ended)
"""
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "sites-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "allhands"
[tool.flwr.app.components]
serverapp = "sites_app.server:app"
clientapp = "sites_app.client:app"
[tool.flwr.app.config]
"""


class Group:
    """The processes of one contender, which all carry a mark in their environment, and all end with
    the context."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, secrets.token_hex(8)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.peaks: dict[str, float] = {}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started.values():
            process.terminate()
        deadline = time.monotonic() + 15
        while self.members() and time.monotonic() < deadline:
            for process in self.started.values():
                process.poll()
            time.sleep(0.2)
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self.started.values():
            process.wait()

    def environment(self, **more: str) -> dict[str, str]:
        """Of a process of this group: one thread, no telemetry, no look for updates, no installing,
        a home of its own."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLWR_", "ALLHANDS_"))
        }
        silent = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "SITES_BENCHMARK": self.mark,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        return {**kept, **silent, **more}

    def start(self, name: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes into NAME.log; in a session of its own, among which
        Linux divides the machine."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment(**more),
                start_new_session=True,
            )
        return self.started[name]

    def members(self) -> list[psutil.Process]:
        """Every process that carries the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("SITES_BENCHMARK") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def wait(self, done: Callable[[], bool], roles: dict[str, str]) -> None:
        """Until it is done; looks at the memory of the processes that `roles` names by a part of
        their command line meanwhile."""
        deadline, looked = time.monotonic() + LIMIT, 0.0
        while not done():
            dead = [name for name, process in self.started.items() if process.poll()]
            if dead or time.monotonic() > deadline:
                raise SystemExit(f"{dead or 'it'} did not end well:\n{self.said(dead)}")
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                self.look(roles)
            time.sleep(0.1)

    def look(self, roles: dict[str, str]) -> None:
        """Remember the most memory that each role has had, in MB."""
        for member in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(member.cmdline())
                for role, part in roles.items():
                    if part in line:
                        status = Path(f"/proc/{member.pid}/status").read_text()
                        # A process that ends has none.
                        found = re.search(r"VmHWM:\s+(\d+) kB", status)
                        self.peaks[role] = max(
                            self.peaks.get(role, 0.0), int(found[1]) / 1e3 if found else 0.0
                        )

    def resident(self, part: str) -> list[float]:
        """The memory of each process whose command line has this part, in MB."""
        return [
            member.memory_info().rss / 1e6
            for member in self.members()
            if part in " ".join(member.cmdline())
        ]

    def launches(self) -> int:
        """Processes of messages that sites have started: more than messages, where Flower gave one
        up and began anew."""
        logs = [*self.folder.rglob("*.out"), *self.folder.rglob("*.log")]
        return sum(log.read_text(errors="replace").count("Start `flwr-clientapp`") for log in logs)

    def said(self, names: list[str]) -> str:
        """The ends of the logs."""
        logs = [self.folder / f"{name}.log" for name in names] or sorted(self.folder.rglob("*.log"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ours(
    group: Group, model: dict[str, Any], sites: int, rounds: int, loading: float, absent: int = 0
) -> subprocess.Popen[bytes]:
    """Start `allhands federated server` and so many of `allhands federated site`; the server waits
    for `absent` more, which are not started."""
    names = [f"site{number}" for number in range(sites + absent)]
    run = {
        "data": {
            "name": "own.py:load",
            "batch_size": IMAGES,
            "options": {"loading": loading, "flat": model is TINY, "count": IMAGES},
        },
        "model": model,
        "criterion": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": RATE},
        "logdir": "logs",
        "strategy": {
            "name": "federated",
            "rounds": rounds,
            "local_epochs": 1,
            "algorithm": "fedavg",
            "sites": {"names": names, "wait": LIMIT, "round_timeout": LIMIT},
        },
    }
    (group.folder / "run.yml").write_text(yaml.safe_dump(run))
    (group.folder / "own.py").write_text(OURS)
    port = free_port()
    server = group.start(
        "server",
        "allhands",
        "federated",
        "server",
        "-C",
        "run.yml",
        "--port",
        str(port),
        "--insecure",
    )
    for name in names[:sites]:
        (group.folder / name).mkdir()
        group.start(
            name,
            "allhands",
            "federated",
            "site",
            "-C",
            "run.yml",
            "--server",
            f"127.0.0.1:{port}",
            "--data",
            name,
            "--name",
            name,
            "--insecure",
        )
    return server


def ours(model: dict[str, Any], sites: int, rounds: int, loading: float) -> dict[str, Any]:
    """One run across sites with `allhands federated server` and `allhands federated site`."""
    with tempfile.TemporaryDirectory() as folder, Group(Path(folder)) as group:
        began = time.time()
        server = start_ours(group, model, sites, rounds, loading)
        group.wait(lambda: server.poll() is not None, ROLES)
        if server.returncode:
            raise SystemExit(f"the server failed:\n{group.said(['server'])}")
        took = time.time() - began
        events = events_of(group)
        logs = "".join(
            (group.folder / f"site{number}.log").read_text(errors="replace")
            for number in range(sites)
        )
    ends = [event["time"] for event in events if event["kind"] == "round_end"]
    count = {
        kind: sum(event["kind"] == kind for event in events)
        for kind in ("update", "late", "failed", "bad", "dropped")
    }
    return {
        "rounds": [after - before for before, after in itertools.pairwise(ends)],
        "first": ends[0] - began,
        "all": took,
        "events": count,
        "trained": len(re.findall(r"round \d+: .* steps", logs)),
        "started_again": logs.count("started again"),
        "peak_MB": {role: round(peak) for role, peak in group.peaks.items()},
    }


def events_of(group: Group) -> list[dict[str, Any]]:
    """What the server has written down."""
    path = group.folder / "logs" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def flower(model: dict[str, Any], sites: int, rounds: int, loading: float) -> dict[str, Any]:
    """The same with a minimal Flower app."""
    with tempfile.TemporaryDirectory() as folder, Group(Path(folder)) as group:
        package, times, port = (
            group.folder / "app" / "sites_app",
            group.folder / "times",
            free_port(),
        )
        package.mkdir(parents=True)
        config = {
            "loading": float(loading),
            "flat": model is TINY,
            "count": IMAGES,
            "rate": RATE,
            "sites": sites,
            "rounds": rounds,
            "times": str(times),
        }
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items())
        (package.parent / "pyproject.toml").write_text(PYPROJECT + lines)
        (package / "__init__.py").touch()
        for name, text in (("data", DATA), ("client", CLIENT), ("server", SERVER)):
            given = text.replace("app = ", f"MODEL = {model!r}\napp = ", 1)
            (package / f"{name}.py").write_text(textwrap.dedent(given))
        homes = {
            name: group.folder / f"home-{name}" for name in ("link", "run", *map(str, range(sites)))
        }
        for home in homes.values():
            home.mkdir()
        (homes["run"] / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n[superlink.lab]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        began = time.time()
        group.start(
            "superlink",
            "flower-superlink",
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--disable-runtime-dependency-installation",
            FLWR_HOME=str(homes["link"]),
        )
        for number in range(sites):
            group.start(
                f"node{number}",
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(free_port()),
                "--node-config",
                f"partition-id={number} num-partitions={sites}",
                FLWR_HOME=str(homes[str(number)]),
            )
        roles = {"superlink": "flower-superlink", "serverapp": "flwr-serverapp"}
        group.wait(lambda: listens(port), roles)
        group.start("run", "flwr", "run", "app", "lab", FLWR_HOME=str(homes["run"]))
        group.wait(lambda: times.exists() and times.read_text().count("\n") > rounds, roles)
        took = time.time() - began
        launches = group.launches()
        ends = [float(line) for line in times.read_text().split()][
            1:
        ]  # the first is that of the beginning
    return {
        "rounds": [after - before for before, after in itertools.pairwise(ends)],
        "first": ends[0] - began,
        "all": took,
        "launches": launches,
        "peak_MB": {role: round(peak) for role, peak in group.peaks.items()},
    }


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def beside(args: argparse.Namespace, loading: float) -> dict[str, Any]:
    """Rounds of both in turns."""
    model = TINY if args.tiny else RESNET
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], "flower": []}
    for _ in range(args.turns):
        for name, contender in (("ours", ours), ("flower", flower)):
            turns[name].append(contender(model, args.sites, args.rounds, loading))
            print(f"{name:8s} loading {loading:g} s: {shown(turns[name][-1])}", flush=True)
    median = {
        name: [statistics.median(turn["rounds"]) for turn in given] for name, given in turns.items()
    }
    ratios = [own / theirs for own, theirs in zip(median["ours"], median["flower"], strict=True)]
    print(
        f"a round of ours takes {statistics.median(ratios):.2f} of theirs; by turn "
        f"{[round(ratio, 2) for ratio in ratios]}"
    )
    seconds = {name: statistics.median(given) for name, given in median.items()}
    return {
        "sites": args.sites,
        "loading": loading,
        "seconds": seconds,
        "ours_of_flowers": {"median": statistics.median(ratios), "turns": ratios},
        "turns": turns,
    }


def fixed(args: argparse.Namespace) -> dict[str, Any]:
    """A round's time where training and transfer take next to none."""
    result = ours(TINY, args.sites, 10, 0.0)
    seconds = statistics.median(result["rounds"])
    print(f"{args.sites} sites, 10 rounds: median {seconds:.2f} s; {shown(result)}", flush=True)
    return {"sites": args.sites, "seconds": seconds, **result}


def many(args: argparse.Namespace) -> dict[str, Any]:
    """10 sites with a tiny model."""
    result = ours(TINY, args.many, 3, 0.0)
    print(f"{args.many} sites, 3 rounds: {shown(result)}; {result['events']}", flush=True)
    return {"sites": args.many, **result}


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The server's memory with few and with more sites."""
    rows = []
    for sites in map(int, args.memory.split(",")):
        rows.append({"sites": sites, **ours(TINY if args.tiny else RESNET, sites, 3, 0.0)})
        print(f"{sites} sites: {shown(rows[-1])}", flush=True)
    return rows


def greeted(group: Group) -> set[str]:
    """The sites that have told the server what they have."""
    return {event["site"] for event in events_of(group) if event["kind"] == "greeted"}


def rest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The memory of the server's processes while sites are connected and nothing is to be done."""
    rows: list[dict[str, Any]] = []
    for sites in map(int, args.rest.split(",")):
        with tempfile.TemporaryDirectory() as folder, Group(Path(folder)) as group:
            start_ours(group, TINY, sites, 1, 0.0, absent=1)
            group.wait(lambda group=group, sites=sites: len(greeted(group)) == sites, {})
            quiet = time.monotonic() + QUIET
            group.wait(lambda quiet=quiet: time.monotonic() > quiet, {})
            found = {role: round(sum(group.resident(part))) for role, part in ROLES.items()}
        rows.append({"sites": sites, "resident_MB": found})
        print(f"{sites} sites at rest: resident MB {found}", flush=True)
    return rows


def shown(result: dict[str, Any]) -> str:
    times = ", ".join(f"{seconds:.1f}" for seconds in result["rounds"])
    return (
        f"rounds {times} s, the first after {result['first']:.1f} s, all {result['all']:.1f} s; "
        f"peak MB {result['peak_MB']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="rounds,loading,fixed,many,memory,rest")
    parser.add_argument("--sites", type=int, default=4, help="of the parts rounds and loading")
    parser.add_argument("--rounds", type=int, default=4, help="of a turn; the first does not count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--loading",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="that the data take in the part loading",
    )
    parser.add_argument("--many", type=int, default=10, help="sites of the part many")
    parser.add_argument("--memory", default="2,8", help="sites of the part memory")
    parser.add_argument("--rest", default="2,8,24", help="sites of the part rest")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the tiny model in all parts, to see that the script works",
    )
    parser.add_argument("--name", default="federated_sites", help="of the file of results")
    parser.add_argument(
        "--no-save", action="store_true", help="only print, to see that the script works"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = {
        "rounds": lambda: beside(args, 0.0),
        "loading": lambda: beside(args, args.loading),
        "fixed": lambda: fixed(args),
        "many": lambda: many(args),
        "memory": lambda: memory(args),
        "rest": lambda: rest(args),
    }
    wanted = args.parts.split(",")
    if unknown := [part for part in wanted if part not in parts]:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(parts)}")
    for part in wanted:
        before, result = machine(), parts[part]()
        before["versions"]["flwr"] = importlib.metadata.version("flwr")
        path = RESULTS / f"{args.name}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if not args.no_save:
            save_json(
                args.name,
                {
                    **kept,
                    part: {"machine": before, "load_after": os.getloadavg(), "result": result},
                },
            )


if __name__ == "__main__":
    main()
