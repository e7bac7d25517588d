"""Whether clients that train stacked learn what they learn alone, as the first batch shows."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from allhands.federated.algorithms.base import Server
from allhands.federated.executors.base import ExecutorContext
from allhands.federated.executors.masked import MaskedLoss
from allhands.federated.executors.stack import Losses, Stack
from allhands.federated.executors.trial import look, some_samples
from allhands.federated.row_layout import RowLayout
from allhands.federated.samples import Samples


def differs_from_alone(work: ExecutorContext, server: Server) -> str | None:
    """Why a stacked step does not give the numbers of single ones, by a trial on a few samples;
    None when it does.

    In float64, in which neither TF32 nor the order of summing hides or feigns a difference; a model
    that knows float32 only is tried as it is."""
    work = replace(work, model=copy.deepcopy(work.model).to(server.device).train())
    indices = some_samples(work)
    assert work.samples.tensors is not None
    given = Samples(tuple(t[indices.to(t.device)] for t in work.samples.tensors), server.device)
    pads = MaskedLoss(work.local.criterion).masks and not look(work, server).couples
    if work.local.precision != "fp32":
        try:
            found = _compare(replace(work, samples=given), server, pads, 1.0)
        except Exception as error:
            return f"its step in {work.local.precision} cannot be batched over clients ({error})"
        if found is not None:
            return (
                f"batched over clients by torch.func.vmap in {work.local.precision}, {found} "
                "comes out as another value"
            )
        work = replace(work, local=replace(work.local, precision="fp32"))
    try:
        found = _compare(*_as_float64(replace(work, samples=given), server), pads, 1e-6)
    except Exception:  # whatever it is, what counts is what the model does as it is
        try:
            found = _compare(
                replace(work, samples=given),
                server,
                pads,
                0.02 if server.layout.dtype.itemsize < 8 else 1e-6,
            )
        except Exception as error:
            return f"its step cannot be batched over clients ({error})"
    if found is None:
        return None
    return f"batched over clients by torch.func.vmap, {found} comes out as another value"


def _as_float64(work: ExecutorContext, server: Server) -> tuple[ExecutorContext, Server]:
    model, criterion = copy.deepcopy(work.model).double(), copy.deepcopy(work.local.criterion)
    if isinstance(criterion, torch.nn.Module):
        criterion.double()
    layout = RowLayout(model, work.local.optimizer.groups)
    assert work.samples.tensors is not None
    tensors = tuple(t.double() if t.is_floating_point() else t for t in work.samples.tensors)
    return (
        replace(
            work,
            model=model,
            local=replace(work.local, criterion=criterion),
            samples=Samples(tensors, server.device),
        ),
        replace(server, layout=layout, weights=server.weights.double()),
    )


def _compare(work: ExecutorContext, server: Server, pads: bool, tolerance: float) -> str | None:
    """What differs between two stacked clients and two single ones, whose data are all samples of
    `work`."""
    losses, layout = Losses(work, server), server.layout
    indices = torch.arange(len(work.samples), device=server.device)
    batches = torch.stack([indices, indices.flip(0)])
    keys = torch.stack([losses.noise.keys(work.seed, 0, client, 1)[0] for client in (0, 1)]).to(
        server.device
    )
    counts = torch.full((2,), float(len(indices)), dtype=layout.dtype, device=server.device)
    stack = Stack(losses, 2, pads, None, False, True)
    stack.load(server.weights, server.integers)
    given = torch.cat([batches, batches[:, :1]], 1) if pads else batches
    found = stack.gradient(given, counts, keys).tolist()
    stack.finish(0, 2)
    made = torch.cat(
        [stack.gradients, (stack.rows - server.weights)[:, layout.trained :]], 1
    ).double()
    for row in (0, 1):
        loss, alone = _alone(losses, batches[row], keys[row])
        if not abs(found[row] - loss) <= tolerance * (1 + abs(loss)):
            return "the loss"
        whole = 0.01 * torch.linalg.vector_norm(alone[: layout.trained])
        for place in layout.places:
            one, other = alone[place.start : place.stop], made[row, place.start : place.stop]
            allowed = tolerance * (
                torch.linalg.vector_norm(one) + (whole if place.start < layout.trained else 1e-9)
            )
            if not bool(torch.linalg.vector_norm(one - other) <= allowed):
                return f"'{place.name}'"
    return None


def _alone(losses: Losses, batch: torch.Tensor, keys: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss of one client, and its gradient and the changes of its buffers as a row in
    float64."""
    layout, start = losses.server.layout, losses.server.weights
    views = {name: view[0].clone() for name, view in layout.views(start[None]).items()}
    weights = [views[place.name].requires_grad_() for place in layout.parameters]
    named = dict(losses.model.named_buffers())
    rest = {name: named[name].clone() for name in layout.integers}
    rest |= {f"{name}.key": key for name, key in zip(losses.noise.names, keys, strict=True)}
    losses.noise.begin()
    with losses.precision.autocast():
        loss = losses.of({**views, **rest}, losses.work.samples.take(batch), None)
    losses.noise.end()
    row = torch.zeros(layout.length, dtype=torch.float64, device=start.device)
    for place, gradient in zip(
        layout.parameters, torch.autograd.grad(loss, weights, allow_unused=True), strict=True
    ):
        if gradient is not None:
            row[place.start : place.stop] = gradient.reshape(-1)
    for place in layout.buffers:
        row[place.start : place.stop] = (
            views[place.name] - layout.views(start[None])[place.name][0]
        ).reshape(-1)
    return float(loss.detach()), row
