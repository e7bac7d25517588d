"""The states of torchmetrics metrics: put together from all ranks, and saved and taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_ragged, all_gather_text
from allhands.errors import UserError
from allhands.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric


@contextmanager
def lists_of_all_ranks(
    name: str, module: Metric, world: World, rows: list[tuple[int, int]]
) -> Iterator[None]:
    """Within, the lists with one tensor a sample (of mean average precision) are those of all
    ranks.

    torchmetrics gathers such a list member by member, so that ranks with other numbers of samples
    would wait for one another.

    Args:
        name, module: the metric.
        world: the ranks.
        rows: of this rank: steps, and how many samples of each the metric has seen. They put a list
            with a member for each sample in the order of the samples, by which mean average
            precision ranks equal scores.
    """
    before = []
    try:
        for _, metric in _metrics_in(module) if world.world_size > 1 else ():
            lists = [state for state in metric.metric_state if _is_by_sample(metric, state)]
            if not lists:
                continue
            all_rows = [json.loads(text) for text in all_gather_text(json.dumps(rows), world)]
            before.append((metric, metric._reductions, {s: getattr(metric, s) for s in lists}))
            for state in lists:
                try:
                    by_rank = all_gather_ragged(getattr(metric, state), world)
                except TypeError as error:
                    raise UserError(
                        f"metric '{name}', a {type(module).__name__}, keeps '{state}' as what is "
                        f"no tensor, so that what {world.world_size} workers have measured cannot "
                        "be put together; measure it in one process, by evaluate(…)"
                    ) from error
                setattr(metric, state, _in_order(by_rank, all_rows))
            metric._reductions = {  # what is left for the metric to put together
                state: how for state, how in metric._reductions.items() if state not in lists
            }
        yield
    finally:
        for metric, reductions, states in before:
            metric._reductions = reductions
            for state, value in states.items():
                setattr(metric, state, value)


def _in_order(by_rank: list[list[Any]], rows: list[list[list[int]]]) -> list[Any]:
    """What the ranks have, in the order of the samples; one rank's after another's where it is not
    one for each sample."""
    if any(
        len(items) != sum(count for _, count in own)
        for items, own in zip(by_rank, rows, strict=True)
    ):
        return [item for items in by_rank for item in items]
    pieces = []
    for rank, (items, own) in enumerate(zip(by_rank, rows, strict=True)):
        begin = 0
        for step, count in own:
            pieces.append((step, rank, items[begin : begin + count]))
            begin += count
    pieces.sort(key=lambda piece: piece[:2])
    return [item for _, _, part in pieces for item in part]


def _is_by_sample(metric: Any, state: str) -> bool:
    """Whether a state is a list whose members stay apart."""
    return isinstance(getattr(metric, state), list) and metric._reductions[state] is None


def _metrics_in(module: Metric) -> list[tuple[str, Any]]:
    """A torchmetrics metric and those inside it, by path."""
    return [
        (path, metric) for path, metric in module.named_modules() if hasattr(metric, "metric_state")
    ]


def shape_empty_states(module: Metric, world: World) -> None:
    """Give the lists of outputs that a metric keeps (AUROC) an empty tensor of the right form on
    ranks without a sample.

    torchmetrics gathers float32 of shape ``[0]`` from such a rank, whatever the others hold, which
    ends their processes.
    """
    lists = [
        (f"{path}:{name}", metric, name)
        for path, metric in _metrics_in(module)
        for name, value in metric.metric_state.items()
        if isinstance(value, list) and not _is_by_sample(metric, name)
    ]
    kept = {key: getattr(metric, name)[0] for key, metric, name in lists if getattr(metric, name)}
    forms = {key: [list(value.shape[1:]), str(value.dtype)] for key, value in kept.items()}
    known: dict[str, Any] = {}
    for text in all_gather_text(json.dumps(forms), world):
        known |= json.loads(text)
    for key, metric, name in lists:
        if key in known and key not in kept:
            shape, dtype = known[key]
            empty = torch.empty(
                0, *shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=world.device
            )
            setattr(metric, name, [empty])


def states_of(module: Metric) -> dict[str, torch.Tensor]:
    """A torchmetrics metric's states, and those of metrics inside it, as tensors by name."""
    states = {}
    for path, metric in _metrics_in(module):
        states[f"{path}:updates"] = torch.tensor(metric.update_count)
        for name, value in metric.metric_state.items():
            if isinstance(value, list):
                states |= {f"{path}:{name}/{number}": item for number, item in enumerate(value)}
            else:
                states[f"{path}:{name}"] = value
    return states


def take_up_states(
    name: str, module: Metric, states: Mapping[str, torch.Tensor], merge: bool
) -> None:
    """Give `module` the states that `states_of` gave of another, or merge them into its own."""
    other = module.clone() if merge else module
    if merge:
        other.reset()
    for path, metric in _metrics_in(other):
        for state, value in metric.metric_state.items():
            if isinstance(value, list):
                count = sum(key.startswith(f"{path}:{state}/") for key in states)
                setattr(
                    metric,
                    state,
                    [states[f"{path}:{state}/{i}"].to(metric.device) for i in range(count)],
                )
            else:
                setattr(metric, state, states[f"{path}:{state}"].to(metric.device))
        metric._update_count = int(states[f"{path}:updates"])
        metric._computed = None
    if merge:
        try:
            module.merge_state(other)
        except RuntimeError as error:
            raise UserError(
                f"metric '{name}' cannot go on in the middle of an epoch with another number of "
                f"workers ({error}); resume with "
                "the same number, or from a checkpoint of the end of an epoch"
            ) from None
