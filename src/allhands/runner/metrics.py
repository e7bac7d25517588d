"""Losses and metrics over whole loaders: sums and counts, reduced once, every sample exactly
once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allhands.data import rows_in
from allhands.errors import UserError, did_you_mean, kind_of
from allhands.loop.loss_mean import LossMean
from allhands.runner.keys import chosen_output
from allhands.runner.metric_states import (
    lists_of_all_ranks,
    shape_empty_states,
    states_of,
    take_up_states,
)
from allhands.step.counted import output_advice
from allhands.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric

MetricLike = Any  # a torchmetrics.Metric, or a function (output, target) -> mean over the samples

# Outputs are handed to the metrics in groups, so that a metric's own overhead is paid once a group
# and not once a batch; this bounds what is kept meanwhile, in elements.
_GROUP_ELEMENTS = 1 << 18


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of samples whose largest output is the target class; output ``[batch, classes, …]``,
    target ``[batch, …]``."""
    return (output.argmax(dim=1) == target).double().mean()


BUILT_IN: dict[str, MetricLike] = {"accuracy": accuracy}


def named_metrics(metrics: Any) -> dict[str, MetricLike]:
    """Metrics by name, from a dict, or from a list whose members name themselves; from a dict of
    these by loader, a dict of such dicts. A MetricCollection of torchmetrics is taken apart.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and any(map(_are_several, metrics.values())):
        odd = [name for name, value in metrics.items() if not _are_several(value)]
        if odd:
            raise UserError(
                f"metrics names some by loader, and {', '.join(map(repr, odd))} without one; write "
                f"metrics={{'valid': {{'{odd[0]}': …}}}}, or all of them for all loaders"
            )
        return {str(loader): named_metrics(own) for loader, own in metrics.items()}
    if isinstance(metrics, (str, bytes)) or callable(metrics):
        metrics = [metrics]
    named: dict[str, MetricLike] = {}
    pairs = _taken_apart(
        metrics.items()
        if isinstance(metrics, Mapping)
        else ((None if isinstance(m, torch.nn.ModuleDict) else _name_of(m), m) for m in metrics)
    )
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric not in BUILT_IN:
                raise UserError(
                    f"there is no built-in metric '{metric}'{did_you_mean(metric, BUILT_IN)} Known "
                    f"are: {', '.join(BUILT_IN)}. Pass a torchmetrics metric or a "
                    "function (output, target) -> mean, by name: metrics={'name': …}"
                )
            metric = BUILT_IN[metric]  # noqa: PLW2901
        if not callable(metric):
            raise UserError(
                f"metric '{name}' is a {type(metric).__name__}; it must be a torchmetrics metric "
                "or a function"
            )
        if name in named:
            raise UserError(
                f"two metrics are named '{name}'; name them apart: metrics={{'{name}_1': …, "
                f"'{name}_2': …}}"
            )
        if name == "loss":
            raise UserError(
                "a metric cannot be named 'loss', which is the criterion's value; give it another "
                "name"
            )
        named[str(name)] = metric
    return named


def all_metrics(named: Mapping[str, Any]) -> dict[str, MetricLike]:
    """What `named_metrics` gave, of all loaders together."""
    found: dict[str, MetricLike] = {}
    for name, metric in named.items():
        found |= metric if isinstance(metric, dict) else {name: metric}
    return found


def metrics_by_loader(
    named: Mapping[str, Any], loaders: Iterable[str]
) -> dict[str, dict[str, MetricLike]]:
    """What `named_metrics` gave, for each of the loaders."""
    known = list(loaders)
    if not any(isinstance(own, dict) for own in named.values()):
        return {loader: dict(named) for loader in known}
    for name in named:
        if name not in known:
            raise UserError(
                f"metrics are named for loader {name!r}, and there is none"
                f"{did_you_mean(name, known)} Loaders are: {', '.join(known)}"
            )
    return {loader: named.get(loader, {}) for loader in known}


def _are_several(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _taken_apart(pairs: Iterable[tuple[str | None, Any]]) -> Iterator[tuple[Any, Any]]:
    """The members of a MetricCollection, which is a ModuleDict, in its place."""
    for name, metric in pairs:
        if isinstance(metric, torch.nn.ModuleDict):
            for own, member in metric.items():
                yield own if name is None else f"{name}_{own}", member
        else:
            yield name, metric


def _name_of(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", type(metric).__name__)
    if name == "<lambda>":
        raise UserError(
            "a lambda has no name to report its metric under; write metrics={'name': lambda "
            "output, target: …}"
        )
    return str(name)


class LoaderMetrics(LossMean):
    """The loss and the metrics of one loader, over one epoch.

    Args:
        metrics: by name.
        world, trains, counts: see `LossMean`.
        slices: see `Strategy.slices`.
        output_key: what metrics take of outputs; None: all.
        say: takes a line to print.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricLike],
        world: World,
        trains: bool,
        counts: bool = True,
        slices: Any = None,
        output_key: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.slices, self.output_key, self.say = slices, output_key, say
        self._functions: dict[str, Callable[..., Any]] = {}
        self._modules: dict[str, Metric] = {}
        for name, metric in metrics.items():
            # torchmetrics.Metric is one; this spares its slow import.
            if isinstance(metric, torch.nn.Module):
                if world.world_size > 1 and not getattr(metric, "sync_on_compute", True):
                    raise UserError(
                        f"metric '{name}' was made with sync_on_compute=False, so each of the "
                        f"{world.world_size} ranks would "
                        "report its own samples only; leave that argument out"
                    )
                self._modules[name] = metric.clone().to(world.device)  # type: ignore[operator]
            else:
                self._functions[name] = metric
        self._told: set[str] = set()
        super().__init__(world, trains, counts)

    def start(self, where: str) -> None:
        self._sums = dict.fromkeys(self._functions, 0.0)
        super().start(where)
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._shape: tuple[torch.Size, torch.Size] | None = None  # of a row of these
        self._kept = 0
        # Of outputs that are no tensors: the step and the samples of each.
        self._rows: list[tuple[int, int]] = []
        for module in self._modules.values():
            module.reset()

    def observe(
        self, output: Any, target: Any, loss: torch.Tensor | None, factor: float, count: Any
    ) -> None:
        super().observe(output, target, loss, factor, count)
        if not (self._functions or self._modules):
            return
        if self.slices is not None:
            output = self.slices.full_output(output)
        if self.counts:
            self._keep(chosen_output(output, self.output_key), target)

    def _keep(self, output: Any, target: Any) -> None:
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            rows = _rows(output, target)
            self._rows.append((self.step, rows))
            self._update(output, target, rows)
            return
        shape = output.shape[1:], target.shape[1:]
        if shape != self._shape:
            self._flush()
            self._shape = shape
        self._outputs.append(output.detach())
        self._targets.append(target)
        self._kept += output.numel()
        if self._kept >= _GROUP_ELEMENTS:
            self._flush()

    def _flush(self) -> None:
        if self._outputs:
            output, target = torch.cat(self._outputs), torch.cat(self._targets)
            self._outputs, self._targets, self._kept = [], [], 0
            self._update(output, target, len(output))

    def _update(self, output: Any, target: Any, rows: int) -> None:
        self.samples += rows
        with torch.no_grad():
            for name, function in self._functions.items():
                if function is accuracy and not isinstance(output, torch.Tensor):
                    raise UserError(
                        f"metric '{name}' takes a tensor, and the model's output is "
                        f"{kind_of(output)}; {output_advice(output)}"
                    )
                value = function(output, target)
                if isinstance(value, torch.Tensor):
                    if value.numel() != 1:
                        raise UserError(
                            f"metric '{name}' returned shape {list(value.shape)}; it must return "
                            "one number, the mean"
                        )
                    value = value.detach().reshape(()).double()
                self._sums[name] = self._sums[name] + value * rows
            for name, module in self._modules.items():
                try:
                    module.update(output, target)
                except (TypeError, AttributeError, ValueError, RuntimeError) as error:
                    if isinstance(output, torch.Tensor):
                        raise
                    raise UserError(
                        f"metric '{name}', a {type(module).__name__}, cannot take the model's "
                        f"output, which is {kind_of(output)} ({type(error).__name__}: {error}); "
                        f"write a function of it, metrics={{'{name}': lambda output, target: "
                        f"…}}, or {output_advice(output)}"
                    ) from error

    def partial(self) -> dict[str, torch.Tensor]:
        parts = super().partial()
        # What is kept for the next group stays as it is, so that sums are rounded as they would
        # have been without the save.
        for number, (output, target) in enumerate(zip(self._outputs, self._targets, strict=True)):
            parts[f"output/{number}"], parts[f"target/{number}"] = output, target
        for name, module in self._modules.items():
            parts |= {f"module/{name}/{key}": value for key, value in states_of(module).items()}
        return parts

    def take_up(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        super().take_up(parts)
        for number, part in enumerate(parts):
            for name, module in self._modules.items():
                prefix = f"module/{name}/"
                states = {
                    key.removeprefix(prefix): value
                    for key, value in part.items()
                    if key.startswith(prefix)
                }
                take_up_states(name, module, states, merge=number > 0)
            kept = sum(key.startswith("output/") for key in part)
            for index in range(kept):
                output, target = part[f"output/{index}"], part[f"target/{index}"]
                self._keep(output.to(self.world.device), target.to(self.world.device))

    def result(self) -> dict[str, float]:
        """The loss and every metric over all samples of all ranks, the same numbers on every
        rank."""
        self._flush()
        return super().result()

    def _computed(self, some_empty: bool) -> dict[str, float]:
        if some_empty:
            for module in self._modules.values():
                shape_empty_states(module, self.world)
        values: dict[str, float] = {}
        for name, module in self._modules.items():
            with lists_of_all_ranks(name, module, self.world, self._rows):
                # Each module reduces its other states over the ranks itself.
                computed = module.compute()
            for key, value in self._numbers(name, computed).items():
                if key in values or key in self._sums or key == "loss":
                    raise UserError(
                        f"two metrics give a value named '{key}'; name them apart: "
                        f"metrics={{'{name}_1': …}}"
                    )
                values[key] = value
        return values

    def _numbers(self, name: str, computed: Any) -> dict[str, float]:
        if not isinstance(computed, Mapping):
            return {name: _scalar(name, computed)}
        numbers = {
            f"{name}_{key}": float(value)
            for key, value in computed.items()
            if isinstance(value, (int, float)) or _is_number(value)
        }
        left = [str(key) for key in computed if f"{name}_{key}" not in numbers]
        if left and self.say is not None and name not in self._told:
            self._told.add(name)
            self.say(f"note: metric '{name}' computes {', '.join(left)}, too, which is no number")
        return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _scalar(name: str, value: Any) -> float:
    if _is_number(value):
        return float(value)
    raise UserError(
        f"metric '{name}' computed {type(value).__name__} {getattr(value, 'shape', '')}; only "
        "single numbers can be reported, set average=…"
    )


def _rows(output: Any, target: Any) -> int:
    """Samples of a batch, see `rows_in`; those of the output or the target, whichever tells."""
    rows = rows_in((output, target))
    if rows is None:
        raise UserError(
            f"cannot tell how many samples a model's output of type {type(output).__name__} and a "
            f"target of type {type(target).__name__} hold; return tensors whose first dimension is "
            "the batch, or a list with a dict for each sample"
        )
    return rows
