"""Layers that each client keeps as its own, and the measuring of the models that result."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence

import torch
from torch import nn

from allhands.compat import NormBase
from allhands.errors import UserError, did_you_mean
from allhands.federated.algorithms.base import OWN_LAYERS, Algorithm, Server, Trained
from allhands.federated.client_states import ClientStates
from allhands.federated.clients import Clients
from allhands.federated.executors.base import ExecutorContext
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples
from allhands.step import Precision
from allhands.world import World


def own_numbers(
    patterns: Sequence[str], model: nn.Module, layout: RowLayout
) -> torch.Tensor | None:
    """Places in a row of the weights and floating-point buffers that patterns name: int64; None for
    none.

    Args:
        patterns: names of modules, parameters or buffers, with ``*`` and ``?`` as in a shell; a
            module stands for all that is in it.
        model: the model.
        layout: its places.
    """
    modules = [name for name, _ in model.named_modules() if name]
    known = list(
        dict.fromkeys(
            [
                *modules,
                *(name for name, _ in model.named_parameters()),
                *(n for n, _ in model.named_buffers()),
            ]
        )
    )
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in known if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise UserError(
                "local_layers: the model has nothing called "
                f"{pattern!r}{did_you_mean(pattern, known)} It has: {', '.join(modules)}"
            )
        found |= matched
    for name, module in model.named_modules():
        counts = (
            isinstance(module, NormBase) and module.track_running_stats and module.momentum is None
        )
        if counts and _within(f"{name}.running_mean", found):
            raise UserError(
                f"'{name}' has momentum=None, for which its counter of batches must stay with the "
                "client too, and counters are shared; set its momentum, for example 0.1"
            )
    places = [
        torch.arange(place.start, place.stop)
        for place in layout.places
        if _within(place.name, found)
    ]
    return torch.cat(places) if places else None


def own_layers(
    patterns: Sequence[str], model: nn.Module, server: Server, algorithm: Algorithm
) -> torch.Tensor | None:
    """`own_numbers` on the server's device."""
    layout = server.layout
    own = own_numbers(patterns, model, layout)
    kept = torch.zeros(layout.length, dtype=torch.bool)
    kept[own if own is not None else []] = True
    if algorithm.shares and all(kept[place.start] for place in layout.parameters):
        raise UserError(
            "local_layers name every weight that is trained, so that nothing is shared; write "
            "algorithm='local_only'"
        )
    shared = [place.name for place in layout.buffers if not kept[place.start]]
    if algorithm.shares and not algorithm.average_buffers and shared:
        raise UserError(
            f"the model has buffers that training changes, such as '{shared[0]}' (BatchNorm's "
            f"statistics?), and algorithm={algorithm.name!r} says nothing about their mean; "
            "use GroupNorm, or keep these layers with the clients (algorithm='fedbn', "
            "local_layers=[…]), or set the algorithm's average_buffers=True for their mean by "
            "samples"
        )
    return None if own is None else own.to(server.device)


def keep_own(trained: Trained, server: Server) -> None:
    """Move clients' own layers out of what they have learnt into what they keep; for the rest of
    the round they have learnt nothing there."""
    if server.own is None:
        return
    kept, start = trained.own[OWN_LAYERS], trained.start.expand(len(trained.rows), -1)
    kept[:, :-1] = trained.rows[:, server.own]
    kept[:, -1] = 1.0
    trained.rows[:, server.own] = start[:, server.own]


def evaluate_clients(
    work: ExecutorContext, server: Server, states: ClientStates, tests: Clients, world: World
) -> torch.Tensor:
    """Measure every client's own model on its own test samples; called on every rank.

    A client's model is the global one with the client's own layers in it, once it has trained; each
    is measured on the rank that keeps them.

    Args:
        work: the model, which is overwritten, the criterion, and the samples into which `tests`
            points.
        server: the global model.
        states: what clients keep.
        tests: each client's test samples; one without any counts for nothing.
        world: the ranks.

    Returns:
        For each client what `measure` gives: float64, shape ``[clients, 4]``.
    """
    totals = torch.zeros(len(tests), 4, dtype=torch.float64, device=server.device)
    for client in range(len(tests)):
        if states.owner.get(client, client % world.world_size) == world.rank and tests.size(client):
            totals[client] = measure(
                work, server, states.get([client]), client, work.samples, tests.samples(client)
            )
    if world.world_size > 1:
        torch.distributed.all_reduce(totals)
    return totals


def means(totals: Sequence[float]) -> dict[str, float]:
    """The mean loss over samples, and where all targets are classes accuracy (0 to 1), of totals
    that `measure` gave; NaN of no sample."""
    count, loss, classed, right = totals
    found = {"loss": loss / count if count else math.nan}
    return {**found, "accuracy": right / classed} if count and classed == count else found


def measure(
    work: ExecutorContext,
    server: Server,
    state: dict[str, torch.Tensor],
    client: int,
    samples: Samples,
    indices: torch.Tensor,
) -> torch.Tensor:
    """What one client's own model makes of some samples: how many they are, the sum of their
    losses, how many of them have classes for targets, and how many of those are right; float64,
    shape ``[4]``.

    Args:
        work: the model, which is overwritten, and the criterion.
        server: the global model.
        state: what the client keeps, as `ClientStates.get` gives it.
        client: its number.
        samples, indices: the samples, and which of them (int64).
    """
    model, local = work.model, work.local
    totals = torch.zeros(4, dtype=torch.float64, device=server.device)
    training, precision = model.training, Precision(local.precision, server.device)
    model.eval()
    with torch.no_grad():
        server.layout.write_integers(server.integers, model)
        server.layout.write(server.start(state).view(-1), model)
        for batch in indices.split(max(local.batch_size or 0, 256)):
            with precision.autocast():
                output, target = local.forward(
                    model, samples.take(batch, work.seed, "test", client)
                )
                loss = local.criterion(output, target)
            totals[0] += len(batch)
            totals[1] += loss.double() * len(batch)
            if _classes(output, target):
                totals[2] += len(batch)
                totals[3] += (output.argmax(1) == target).sum()
    model.train(training)
    return totals


def _classes(output: object, target: object) -> bool:
    return (
        isinstance(output, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and output.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
    )


def _within(name: str, found: set[str]) -> bool:
    """Whether a name, or that of a module around it, is among those found."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in found for end in range(1, len(parts) + 1))
