"""The examination: who is asked what, in which order. What the answers mean is decided in the other
files."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from allhands.doctor import allreduce, gpus, job_folder, machine, network
from allhands.doctor.contact import Contact
from allhands.doctor.finding import CHECKS, TOGETHER, Finding, Report
from allhands.errors import HostError
from allhands.launch.hosts import HostSpec
from allhands.launch.job_nodes import Host
from allhands.launch.local import LocalHost
from allhands.launch.ssh import SshHost

HERE = "this machine"
_FACTS_S = 25.0
_FLOOD_S = 0.5
_PINGS = 5

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Request:
    """What to examine.

    Attributes:
        hosts: reached by ssh; none: this machine alone.
        python: the Python on them.
        env: variables for the workers on them.
        folder: the job's folder.
        copies: a launch copies its files there, and makes it where it is missing
            (`--sync-dst-dir`).
        all_reduce: run one.
        kinds: measure collectives of other kinds too.
        per_gpu: it has a worker for each GPU, instead of one a host (or two on this machine alone).
    """

    hosts: Sequence[HostSpec] = ()
    python: str = sys.executable
    env: Mapping[str, str | None] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    copies: bool = False
    all_reduce: bool = True
    kinds: bool = False
    per_gpu: bool = False


def examine(request: Request, say: Callable[[str], None] = lambda text: None) -> Report:
    """Look at this machine and all hosts. Must be called in the main thread, because the all-reduce
    handles signals.

    Args:
        request: what to look at.
        say: called with a line whenever something begins that takes seconds.

    Raises:
        UserError: this machine has no ssh, or a name cannot be passed on to a host's shell.
    """
    began = time.monotonic()
    examination = _Examination(request, say)
    with examination.contacts():
        examination.hosts_alone()
        examination.hosts_together()
    if request.all_reduce:
        examination.all_reduce()
    names = [HERE, *(spec.name for spec in request.hosts)]
    order = {name: index for index, name in enumerate([*names, TOGETHER])}
    findings = sorted(
        examination.findings, key=lambda one: (order[one.host], CHECKS.index(one.check))
    )
    return Report(names, findings, time.monotonic() - began)


class _Examination:
    """One examination. `facts` and `up` lack the hosts that could not be examined."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self.request, self.say = request, say
        self.findings: list[Finding] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.here = Contact(HERE, None, sys.executable, {})
        self.others = [
            Contact(spec.name, self._ssh(spec), request.python, request.env)
            for spec in request.hosts
        ]
        self.up: list[Contact] = []
        # The interface of each host on the way to the others.
        self.chosen: dict[str, dict[str, Any]] = {}
        self.blocked: list[Finding] = []
        self.socket_rate: float | None = None  # bytes a second

    def _ssh(self, spec: HostSpec) -> SshHost:
        return SshHost(spec, self.request.python, self.request.env)

    @contextlib.contextmanager
    def contacts(self) -> Iterator[None]:
        """Ends all probes, however the examination ends."""
        self.pool = ThreadPoolExecutor(2 * len(self.others) + 2)
        try:
            yield
        finally:
            list(self.pool.map(lambda contact: contact.close(), [self.here, *self.others]))
            self.pool.shutdown()
            for contact in self.others:
                assert contact.ssh is not None
                contact.ssh.close()

    def _ask(
        self, contacts: Sequence[Contact], question: Callable[[Contact], Answer]
    ) -> dict[str, Answer]:
        """What each of them answers, all at the same time; one that fails is told and asked no
        more."""

        def one(contact: Contact) -> Answer | HostError:
            try:
                return question(contact)
            except HostError as error:
                return error

        contacts, answers = list(contacts), dict[str, Answer]()
        for contact, answer in zip(contacts, self.pool.map(one, contacts), strict=True):
            if isinstance(answer, HostError):
                self.findings.append(
                    machine.unreachable(
                        contact.name, str(answer).removeprefix(f"host {contact.name}: ")
                    )
                )
                if contact in self.up:
                    self.up.remove(contact)
                self.facts.pop(contact.name, None)
            else:
                answers[contact.name] = answer
        return answers

    # ------------------------------------------------------------------ each host by itself

    def hosts_alone(self) -> None:
        """Log in everywhere, and ask each one about itself."""
        request = self.request
        if request.hosts:
            self.say(f"logging in to {', '.join(spec.name for spec in request.hosts)}")
        started = self._ask([self.here, *self.others], lambda contact: contact.start())
        self.up = [contact for contact in [self.here, *self.others] if contact.name in started]
        self.facts = self._ask(self.up, lambda contact: contact.ask("facts", _FACTS_S))
        clocks = self._ask([contact for contact in self.up if contact is not self.here], _clock)
        for contact in self.up:
            self._judge(contact, self.facts[contact.name], clocks.get(contact.name))
        if not request.hosts:
            self._slurm()

    def _judge(
        self, contact: Contact, facts: dict[str, Any], clock: tuple[float, float] | None
    ) -> None:
        host, add = contact.name, self.findings.append
        if contact is not self.here:
            add(machine.login(host, contact.login_s))
            add(machine.shell(host, contact.noise))
            add(machine.clock(host, *(clock or (0.0, 0.0))))
        if self.request.hosts:
            add(machine.rsync(host, facts["rsync"], needed=self.request.copies))
        add(machine.python(host, facts))
        add(network.own_name(host, facts))
        self.findings += gpus.gpus(host, facts)
        add(machine.cores(host, facts))
        add(machine.memory(host, facts["memory"]))
        add(machine.shm(host, facts["shm"]))
        add(machine.limits(host, facts))

    def _slurm(self) -> None:
        result = partial(Finding, TOGETHER, "slurm")
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            return
        nodes = os.environ.get("SLURM_JOB_NODELIST", "unknown nodes")
        found = f"inside job {job} of Slurm on {nodes}"
        if shutil.which("srun") is None:
            advice = (
                "add the folder of Slurm's programs to PATH; allhands starts workers on the "
                "nodes with srun"
            )
            self.findings.append(
                result("problem", f"{found}, but there is no srun in PATH", advice)
            )
            return
        advice = (
            "only this node was examined: `srun --ntasks-per-node=1 allhands doctor --json` "
            "examines each by itself, and "
            "`allhands doctor -H NODES` all of them together where ssh may log in to them"
        )
        self.findings.append(result("ok", found, advice))

    # ------------------------------------------------------------------ hosts together

    def _hosts_up(self) -> list[Contact]:
        return [contact for contact in self.up if contact is not self.here]

    def hosts_together(self) -> None:
        """Versions, names, ports, links, and the folder of the job."""
        facts = {contact.name: self.facts[contact.name] for contact in self._hosts_up()}
        if facts:
            if len(facts) > 1:
                self.findings += machine.versions(facts) + gpus.alike(facts)
            if HERE in self.facts:
                self.findings += machine.launcher(self.facts[HERE], facts)
        if len(facts) > 1:
            self.say(f"connecting {', '.join(facts)} to one another")
            self._names()
            self._ports()
        for contact in self.up:
            mine = self.chosen.get(contact.name, {})
            self.findings.append(
                network.interface(
                    contact.name, self.facts[contact.name], mine.get("name"), mine.get("address")
                )
            )
        self.findings += network.mtus(
            {host: one for host, one in self.chosen.items() if one["name"] and one.get("mtu")}
        )
        self._folder()

    def _names(self) -> None:
        names = [contact.name for contact in self._hosts_up()]
        told = self._ask(
            self._hosts_up(),
            lambda contact: contact.ask(
                "resolve", names=[name for name in names if name != contact.name]
            ),
        )
        for host, answer in told.items():
            self.findings += network.other_names(host, answer)

    def _ports(self) -> None:
        """Every host to every other; then, where all got through, all send to the next one at the
        same time."""
        token = secrets.token_hex(16)
        listening = self._ask(self._hosts_up(), lambda contact: contact.ask("listen", token=token))
        targets = {
            host: {
                "names": list(dict.fromkeys([*told["addresses"][:1], host, *told["addresses"]])),
                "port": told["port"],
            }
            for host, told in listening.items()
        }

        def connect(contact: Contact) -> Any:
            others = [one for host, one in targets.items() if host != contact.name]
            return contact.ask("connect", 12.0, token=token, targets=others)

        told = self._ask(self._hosts_up(), connect)
        pairs = {
            (source, target): answer
            for source, answers in told.items()
            for target, answer in zip(
                [host for host in targets if host != source], answers, strict=True
            )
        }
        found = network.ports(pairs, {host: one["port"] for host, one in targets.items()})
        self.findings += found
        self.blocked = [one for one in found if one.status == "problem"]
        self._choose(pairs)
        if not self.blocked and len(told) > 1:
            self._flood(token, pairs, targets)

    def _choose(self, pairs: dict[tuple[str, str], dict[str, Any]]) -> None:
        """The interfaces that a job would use: towards the first host, and on that the one that the
        second host reaches."""
        hosts = [contact.name for contact in self._hosts_up()]
        if len(hosts) < 2:
            return
        for source, target, seen_from in [(hosts[1], hosts[0], True)] + [
            (host, hosts[0], False) for host in hosts[1:]
        ]:
            good = pairs.get((source, target), {}).get("reached")
            if good is None:
                continue
            host, address = (target, good["address"]) if seen_from else (source, good["own"])
            known = next(
                (one for one in self.facts[host]["interfaces"] if address in one["addresses"]), None
            )
            self.chosen[host] = {**(known or {"name": None}), "address": address}

    def _flood(
        self, token: str, pairs: dict[tuple[str, str], dict[str, Any]], targets: dict[str, Any]
    ) -> None:
        hosts = [contact.name for contact in self._hosts_up()]
        following = dict(zip(hosts, [*hosts[1:], hosts[0]], strict=True))

        def send(contact: Contact) -> Any:
            target = following[contact.name]
            address = pairs[contact.name, target]["reached"]["address"]
            return contact.ask(
                "flood",
                20.0,
                address=address,
                port=targets[target]["port"],
                token=token,
                seconds=_FLOOD_S,
            )

        told = self._ask(self._hosts_up(), send)
        if not told:
            return
        found = network.link(
            {(host, following[host]): one for host, one in told.items()}, self._speed()
        )
        self.socket_rate = min(found.values["gb_per_s"].values()) * 1e9
        self.findings.append(found)

    def _speed(self) -> int | None:
        """Of the slowest chosen interface in Mbit/s; None where one of them is not known."""
        speeds = [one.get("speed") for one in self.chosen.values()]
        if speeds and all(speeds):
            return min((speed for speed in speeds if speed), default=None)
        return None

    def _folder(self) -> None:
        path, copies = self.request.folder, self.request.copies
        marks = {contact.name: f".allhands-doctor-{secrets.token_hex(16)}" for contact in self.up}
        if copies:  # it is made on the hosts, and not here
            marks.pop(HERE, None)
        asked = [contact for contact in self.up if contact.name in marks]
        told = self._ask(
            asked,
            lambda one: one.ask("folder", path=path, will_be_made=copies, mark=marks[one.name]),
        )
        for host, answer in told.items():
            if host != HERE or not self.request.hosts or answer["exists"]:
                self.findings.append(job_folder.folder(host, answer, made_by_launch=copies))
        used = {
            host: answer["used"]
            for host, answer in told.items()
            if answer["is_folder"] and not answer["error"]
        }
        asked = [contact for contact in asked if contact.name in used]
        left = list(marks.values())
        seen = self._ask(asked, lambda one: one.ask("look", path=used[one.name], marks=left))
        by_host = {
            host: [name for name, mark in marks.items() if mark in found]
            for host, found in seen.items()
        }
        here = by_host.pop(HERE, None)
        if here is not None:
            here = [name for name in here if name != HERE]
        by_host = {
            host: [name for name in names if name != HERE] for host, names in by_host.items()
        }
        if len(by_host) > 1:
            self.findings.append(job_folder.sharing(path, by_host, here, copies=copies))

    # ------------------------------------------------------------------ all-reduce

    def all_reduce(self) -> None:
        """Run one, unless what was found so far already tells why it must fail."""
        result = partial(Finding, TOGETHER, "all-reduce")
        why = self._why_not()
        if why:
            advice = "it is tried once that is mended"
            self.findings.append(result("warning", f"not tried: {why}", advice))
            return
        specs = self.request.hosts
        counts = gpu_counts = [self._gpus(name) for name in self._names_of_hosts()]
        if not self.request.per_gpu:
            counts = [1] * len(specs) if len(specs) > 1 else [2]
        device = "auto" if all(map(operator.ge, gpu_counts, counts)) else "cpu"
        hosts: list[Host] = [*map(self._ssh, specs)] or [LocalHost()]
        self.say(f"all-reduce by {sum(counts)} workers on {', '.join(self._names_of_hosts())}")
        told, trouble = allreduce.measure(hosts, counts, device, self.request.kinds)
        if told is None:
            advice = (
                "this is what a job would meet: mend the problems above first; if there are "
                "none, the text names rank and cause"
            )
            self.findings.append(result("problem", trouble, advice, {"correct": False}))
            return
        rate = network.should_give(self._speed(), self.socket_rate)
        self.findings.append(network.all_reduce(told, sum(counts), len(hosts), rate))

    def _names_of_hosts(self) -> list[str]:
        return [spec.name for spec in self.request.hosts] or [HERE]

    def _gpus(self, host: str) -> int:
        return gpus.usable(host, self.facts[host]) if host in self.facts else 0

    def _why_not(self) -> str:
        names = self._names_of_hosts()
        missing = [name for name in names if name not in self.facts]
        if missing:
            return f"{', '.join(missing)} could not be examined"
        if self.blocked:
            return self.blocked[0].found
        for finding in self.findings:
            if (
                finding.status == "problem"
                and finding.check in ("python", "versions")
                and finding.host in names
            ):
                return finding.found
        if self.request.per_gpu and (without := [name for name in names if not self._gpus(name)]):
            return f"--gpus, but {', '.join(without)} has no GPU that can be used"
        return ""


def _clock(contact: Contact) -> tuple[float, float]:
    """How many seconds a host's clock is ahead of ours, and the round trip; from the quickest of
    some answers."""
    tries = []
    for _ in range(_PINGS):
        asked = time.time()
        told = contact.ask("clock")
        answered = time.time()
        tries.append((answered - asked, told - (asked + answered) / 2))
    round_trip, skew = min(tries)
    return skew, round_trip
