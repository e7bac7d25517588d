"""A site's part of a training tried without a server: its data and model are looked at, and what
would leave the site is shown. Nothing is sent."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from allhands.data import map_tensors
from allhands.errors import UserError
from allhands.federated.samples import Samples
from allhands.federated.sites.arrays import Expected, pack, unpack
from allhands.federated.sites.definition import Definition
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.site_request import RECORD, task
from allhands.federated.sites.site_worker import SiteWorker
from allhands.federated.sites.update_validator import INTEGERS, UPDATE, norm_of
from allhands.report.table_layout import aligned


@dataclass(frozen=True)
class DryRun:
    """What a site would send.

    Attributes:
        greeting: samples and tests, which the server is told before the first round.
        arrays: of an update: name, shape, type and bytes.
        tensors: of which the update consists: name, shape, and whether it leaves the site.
        figures: sent beside the update.
        measured: sent after an evaluation; empty where the site has no test samples.
        text: all of it, for people.
    """

    greeting: dict[str, float]
    arrays: list[tuple[str, list[int], str, int]]
    tensors: list[tuple[str, list[int], bool]]
    figures: dict[str, float]
    measured: dict[str, float]
    text: str


def try_site(definition: Definition, name: str, data: Path, token: str | None = None) -> DryRun:
    """Do what the server would ask of a site in its first round, with three steps of training.

    Args:
        definition: the training, with the site's own data.
        name: of the site.
        data: its folder.
        token: of the site; only that there is one is told.
    """
    sites = definition.strategy.sites or Sites()
    names = list(sites.names or [name])
    if name not in names:
        raise UserError(
            f"--name {name} is none of strategy.sites.names, which are {', '.join(names)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        worker = SiteWorker(replace(definition, check=True), name, Path(folder), token)
        theirs = worker.description
        if sites.labels is not None:
            theirs = {**theirs, "labels": list(sites.labels)}
        hello = ConfigRecord(
            {"kind": "hello", "description": json.dumps(theirs), "challenge": "none"}
        )
        greeting = _answer(worker, RecordDict({RECORD: hello}))
        update = _answer(worker, _request(worker, "train", names))
        measured = {}
        if worker.num_tests:
            measured = _figures(_answer(worker, _request(worker, "evaluate", names)))
    return _described(worker, data, greeting, update, measured)


def _request(worker: SiteWorker, kind: str, names: Sequence[str]) -> RecordDict:
    """What the server would send: its model is the one that the run file makes."""
    rounds = worker.placed.rounds
    client = names.index(worker.name)
    config = task(kind, "dry-run", rounds.work, rounds.server, client, len(names), len(names), -1)
    beside = rounds.algorithm.beside(rounds.server)
    server = rounds.server
    model = pack({"row": server.weights, INTEGERS: server.integers, **beside})
    return RecordDict({RECORD: config, "model": model})


def _answer(worker: SiteWorker, request: RecordDict) -> RecordDict:
    reply = worker.handle(request)
    config = reply[RECORD]
    assert isinstance(config, ConfigRecord)
    if config["status"] != "ok":
        raise UserError(f"this site would be left out: {config['reason']!s}")
    return reply


def _figures(reply: RecordDict) -> dict[str, float]:
    found = reply["figures"]
    assert isinstance(found, MetricRecord)
    return {name: float(value) for name, value in found.items()}  # type: ignore[arg-type]


def _described(
    worker: SiteWorker,
    data: Path,
    greeting: RecordDict,
    update: RecordDict,
    measured: dict[str, float],
) -> DryRun:
    record = update[UPDATE]
    assert isinstance(record, ArrayRecord)
    arrays = [
        (name, list(array.shape), str(array.dtype), len(array.data))
        for name, array in record.items()
    ]
    server, layout = worker.placed.rounds.server, worker.layout
    own = set() if server.own is None else set(server.own.tolist())
    tensors = [(place.name, list(place.shape), place.start not in own) for place in layout.places]
    sent = [
        ("array", "shape", "type", "bytes"),
        *((name, str(shape), kind, f"{size:,}") for name, shape, kind, size in arrays),
    ]
    changed = [
        (name, str(shape), "" if leaves else "stays here; zeros in its place")
        for name, shape, leaves in tensors
    ]
    counted, figures = _figures(greeting), _figures(update)
    lines = [
        f"Dry run of {worker.name}: nothing was sent, and no server was asked.",
        "Data:",
        f"  folder      {data}",
        f"  to train on {worker.num_samples:,} samples; {_form(worker.samples)}",
    ]
    if worker.num_tests:
        assert worker.placed.tests is not None
        lines += [f"  to test     {worker.num_tests:,} samples; {_form(worker.placed.tests[0])}"]
    else:
        lines += ["  to test     none: this site measures nothing"]
    lines += [
        "Model:",
        f"  {layout.trained:,} numbers are trained; three steps came out well, with loss "
        f"{figures['loss']:.4g}",
        "Leaves this site before it takes part:",
        f"  its name, {worker.name}; samples {worker.num_samples}, tests {worker.num_tests}"
        + ("; a proof that it knows its token" if worker.token is not None else ""),
        f"Leaves this site after each round, of {_steps(worker)} steps:",
        *(f"    {line}" for line in aligned(sent, left=range(4))),
        "  which hold the changes of",
        *(f"    {line}" for line in aligned(changed, left=range(3))),
        f"  and the numbers {_pairs(figures)}",
    ]
    if measured:
        lines += ["Leaves this site after each evaluation:", f"  {_pairs(measured)}"]
    lines += ["What is done to it:", *(f"  {line}" for line in _narrowed(worker, update))]
    return DryRun(counted, arrays, tensors, figures, measured, "\n".join(lines) + "\n")


def _steps(worker: SiteWorker) -> int:
    """Steps of a real round."""
    whole = replace(worker.local, steps=worker.definition.strategy.local_steps)
    return whole.num_steps(worker.num_samples)


def _narrowed(worker: SiteWorker, update: RecordDict) -> Iterable[str]:
    """What clipping, noise, compression and layers of its own make of an update."""
    strategy = worker.definition.strategy
    record = update[UPDATE]
    assert isinstance(record, ArrayRecord)
    expected: Expected = {UPDATE: (worker.layout.dtype, (worker.layout.length,))}
    if INTEGERS in record:
        numbers = len(worker.placed.rounds.server.integers)
        expected = {**expected, INTEGERS: (torch.int64, (numbers,))}
    norm = norm_of(unpack(record, expected)[UPDATE])
    privacy = strategy.privacy
    if privacy is None:
        yield f"it is not clipped; the norm of this one is {norm:.4g}. There is no noise"
    else:
        noise = (
            f"noise of {privacy.noise_multiplier:g} x {privacy.clip:g} is added to the sum by the "
            "server, not here"
            if privacy.noise_multiplier
            else "there is no noise"
        )
        yield f"it is clipped to a norm of {privacy.clip:g}; this one has {norm:.4g}; {noise}"
    if strategy.compression is not None:
        yield f"it is compressed (compress: {getattr(strategy.compression, 'name', 'own')})"
    else:
        yield "it is not compressed"
    limit = None if strategy.sites is None else strategy.sites.max_norm
    if limit is not None:
        yield f"the server refuses one of a norm above {limit:g}"


def _form(samples: Samples) -> str:
    """Shapes and types of one sample."""
    found: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(f"{list(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    map_tensors(samples.take(torch.zeros(1, dtype=torch.int64)), note)
    return f"one is {', '.join(found)}"


def _pairs(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
