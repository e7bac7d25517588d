"""horovodrun's options, as those of `allhands launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from allhands.errors import UserError
from allhands.launch.hosts import HostSpec, read_hosts

# Name -> what it is called here. Each takes one value.
_SAME = {
    "--num-proc": "np",
    "-np": "np",
    "--min-np": "min",
    "--min-num-proc": "min",
    "--max-np": "max",
    "--max-num-proc": "max",
    "-H": "hosts",
    "--hosts": "hosts",
    "--hostfile": "hostfile",
    "-hostfile": "hostfile",
    "-p": "port",
    "--ssh-port": "port",
    "--start-timeout": "start",
    "--timeline-filename": "timeline",
    "--output-filename": "output",
    "--reset-limit": "resets",
    "--elastic-timeout": "rejoin",
    "--fusion-threshold-mb": "fusion",
    "--cache-capacity": "cache",
    "--stall-check-warning-time-seconds": "warn",
    "--stall-check-shutdown-time-seconds": "stop",
    "--network-interfaces": "interface",
    "--network-interface": "interface",
}
_FLAGS = {
    "--disable-cache": "cache off",
    "--no-stall-check": "no warning",
    "--stall-check": "",
    "--gloo": "",
    "--verbose": "",
}
# What changes only how fast Horovod is, or what it writes: said, and left out. The number is that
# of their values.
_WITHOUT_EFFECT = {
    "--cycle-time-ms": 1,
    "--hierarchical-allreduce": 0,
    "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
    "--autotune": 0,
    "--no-autotune": 0,
    "--autotune-log-file": 1,
    "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1,
    "--autotune-gaussian-process-noise": 1,
    "--timeline-mark-cycles": 0,
    "--no-timeline-mark-cycles": 0,
    "--mpi-threads-disable": 0,
    "--no-mpi-threads-disable": 0,
    "--tcp": 0,
    "--num-nccl-streams": 1,
    "--thread-affinity": 1,
    "--gloo-timeout-seconds": 1,
    "--log-level": 1,
    "--log-with-timestamp": 0,
    "--log-without-timestamp": 0,
    "--prefix-output-with-timestamp": 0,
    "-prefix-timestamp": 0,
    "--log-hide-timestamp": 0,
    "--no-log-hide-timestamp": 0,
    "--blacklist-cooldown-range": 2,
    "--mpi": 0,
}
# What would start something else than was meant. The text says what to write instead.
_REFUSED = {
    "--host-discovery-script": "write the hosts with -H, and --min-np for how few may be left",
    "--slots-per-host": "write -H host:slots",
    "--jsrun": "write `--launcher mpi` or `--launcher slurm`",
    "--mpi-args": "write `--launcher mpi --mpirun '…'`",
    "--binding-args": "write `--launcher mpi --mpirun '…'`",
    "--config-file": "write its options in the command line",
    "-i": "name the key in ~/.ssh/config (IdentityFile)",
    "--ssh-identity-file": "name the key in ~/.ssh/config (IdentityFile)",
    "--check-build": "write `allhands doctor`",
    "-cb": "write `allhands doctor`",
}
# Horovod starts workers again as often as it takes; here each time is counted.
_RESETS = 100
_LOCAL = ("localhost", "127.0.0.1")


@dataclass
class _Found:
    values: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # options of `allhands launch` itself
    rest: list[str] = field(default_factory=list)  # the script and its arguments


def translated(words: list[str], arity: Mapping[str, int]) -> list[str]:
    """The words after `allhands launch --horovod …` with horovodrun's options written as its own.

    What has no effect here is said on stderr.

    Args:
        words: all of them; those from the script on stay.
        arity: the options of `allhands launch`, and how many values each takes.
    """
    found = _read(words, arity)
    if "--horovod" not in found.own:  # it is the script's
        return words
    if found.left_out:
        print(
            f"allhands: without effect here, and left out: {', '.join(found.left_out)}",
            file=sys.stderr,
        )
    made: list[str] = []
    values = found.values
    count = values.get("np") or values.get("max") or values.get("min")
    numbers = {
        name: _number(name, values[name])
        for name in ("np", "min", "max", "resets", "port")
        if name in values
    }
    if "max" in numbers and "np" in numbers and numbers["np"] > numbers["max"]:
        raise UserError(
            f"-np {numbers['np']} is more than --max-np {numbers['max']}; set -np to "
            f"{numbers['max']} at most"
        )
    hosts, slots = _hosts(values, numbers.get("port"))
    if count is None and slots is not None and hosts is None:
        count = str(slots)
    if hosts is None and slots is not None and count is not None and int(count) > slots:
        raise UserError(
            f"-np {count}, but the hosts have {slots} slots; set -np to {slots}, or raise the "
            "slots in -H"
        )
    made += ["--workers", count] if count else []
    made += ["--hosts", hosts] if hosts else []
    if "min" in numbers or "max" in numbers or "resets" in numbers:
        made += ["--max-restarts", str(numbers.get("resets", _RESETS))]
    made += (
        ["--min-workers", values["min"]]
        if "min" in numbers and numbers.get("resets", _RESETS)
        else []
    )
    made += ["--rejoin-timeout", values["rejoin"]] if "rejoin" in values else []
    made += ["--log-dir", values["output"]] if "output" in values else []
    for name, value in _variables(found).items():
        made += ["--env", f"{name}={value}"]
    return [*made, *found.own, *found.rest]


def _read(words: list[str], arity: Mapping[str, int]) -> _Found:
    found = _Found()
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("-") or word in ("-", "--"):
            break
        name, sign, value = word.partition("=") if word.startswith("--") else (word, "", "")
        position += 1
        if name in _REFUSED:
            raise UserError(f"horovodrun's {name} is not possible here; {_REFUSED[name]}")
        if name in _SAME:
            takes = 1
        else:
            takes = _WITHOUT_EFFECT.get(name, 0 if name in _FLAGS else arity.get(name, -1))
        if takes < 0:
            if len(word) > 2 and word[:2] in arity and not word.startswith("--"):  # -n4
                found.own.append(word)
                continue
            raise UserError(
                f"{name} is an option of neither horovodrun nor `allhands launch`; see `allhands "
                "launch --help`"
            )
        given = [value] if sign else words[position : position + takes]
        position += 0 if sign else takes
        if len(given) < takes:
            raise UserError(f"{name} needs a value")
        if name in _SAME:
            found.values[_SAME[name]] = given[0]
        elif name in _FLAGS:
            found.flags.add(_FLAGS[name])
        elif name in _WITHOUT_EFFECT:
            found.left_out.append(name)
        else:
            found.own += [word, *([] if sign else given)]
    found.rest = words[position:]
    return found


def _number(name: str, text: str) -> int:
    option = next(option for option, meaning in _SAME.items() if meaning == name)
    if not text.isdecimal():
        raise UserError(f"{option} {text}: {text!r} is no number; set {option} to a whole number")
    return int(text)


def _hosts(values: Mapping[str, str], port: int | None) -> tuple[str | None, int | None]:
    """The hosts as `--hosts` takes them, or None for this machine alone; and how many slots this
    machine has."""
    if "hosts" in values and "hostfile" in values:
        raise UserError("both -H and --hostfile are given; write one of them")
    if "hostfile" in values:
        specs = read_hosts(values["hostfile"])
    elif "hosts" in values:
        if os.path.isfile(values["hosts"]):
            specs = read_hosts(values["hosts"])
        else:
            pairs = [
                entry.strip().rpartition(":")
                for entry in values["hosts"].split(",")
                if entry.strip()
            ]
            entries = [f"{name} slots={slots}" if sign else slots for name, sign, slots in pairs]
            specs = read_hosts(",".join(entries))
    else:
        return None, None
    if len(specs) == 1 and specs[0].name in _LOCAL:
        return None, specs[0].slots or 1
    return ",".join(_written(spec, port) for spec in specs), None


def _written(spec: HostSpec, port: int | None) -> str:
    name = f"[{spec.name}]" if ":" in spec.name else spec.name
    name = f"{spec.user}@{name}" if spec.user else name
    chosen = spec.port or port
    # A host without slots has one, as in horovodrun.
    return f"{name}{f':{chosen}' if chosen else ''} slots={spec.slots or 1}"


def _variables(found: _Found) -> dict[str, str]:
    values = found.values
    made = {}
    if "timeline" in values:
        made["HOROVOD_TIMELINE"] = os.path.abspath(values["timeline"])
    if "start" in values:
        made["HOROVOD_START_TIMEOUT"] = values["start"]
    if "fusion" in values:
        made["HOROVOD_FUSION_THRESHOLD"] = str(_number("fusion", values["fusion"]) * 2**20)
    if "cache" in values or "cache off" in found.flags:
        made["HOROVOD_CACHE_CAPACITY"] = "0" if "cache off" in found.flags else values["cache"]
    if "warn" in values or "no warning" in found.flags:
        made["HOROVOD_STALL_CHECK_TIME_SECONDS"] = (
            "0" if "no warning" in found.flags else values["warn"]
        )
    if "stop" in values:
        made["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = values["stop"]
    if "interface" in values:
        made |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), values["interface"])
    return made
