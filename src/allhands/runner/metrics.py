"""Losses and metrics over whole loaders: sums and counts, reduced once, every sample exactly
once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_text
from allhands.errors import UserError, kind_of
from allhands.loop.loss_mean import LossMean
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
    """Metrics by name, from a dict, or from a list whose members name themselves.

    Raises:
        UserError: a name repeats, is taken, or a member is neither a metric nor a function.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, (str, bytes)) or callable(metrics):
        metrics = [metrics]
    pairs = (
        list(metrics.items())
        if isinstance(metrics, Mapping)
        else [(_name_of(metric), metric) for metric in metrics]
    )
    named: dict[str, MetricLike] = {}
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric not in BUILT_IN:
                raise UserError(
                    f"there is no built-in metric '{metric}'; known are {', '.join(BUILT_IN)}. "
                    "Pass a torchmetrics metric or a "
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
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricLike],
        world: World,
        trains: bool,
        counts: bool = True,
        slices: Any = None,
    ) -> None:
        self.slices = slices
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
        super().__init__(world, trains, counts)

    def start(self, where: str) -> None:
        self._sums = dict.fromkeys(self._functions, 0.0)
        super().start(where)
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._kept = 0
        for module in self._modules.values():
            module.reset()

    def observe(
        self, output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
    ) -> None:
        super().observe(output, target, loss, factor, count)
        if not (self._functions or self._modules):
            return
        if self.slices is not None:
            output = self.slices.full_output(output)
        if self.counts:
            self._keep(output, target)

    def _keep(self, output: Any, target: Any) -> None:
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            self._update(output, target, _rows(output, target))
            return
        if self._outputs and (
            output.shape[1:] != self._outputs[0].shape[1:]
            or target.shape[1:] != self._targets[0].shape[1:]
        ):
            self._flush()
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
                        "…}}, or let handle_batch return the tensor"
                    ) from error

    def partial(self) -> dict[str, torch.Tensor]:
        parts = super().partial()
        # What is kept for the next group stays as it is, so that sums are rounded as they would
        # have been without the save.
        for number, (output, target) in enumerate(zip(self._outputs, self._targets, strict=True)):
            parts[f"output/{number}"], parts[f"target/{number}"] = output, target
        for name, module in self._modules.items():
            parts |= {f"module/{name}/{key}": value for key, value in _states(module).items()}
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
                _take_up_states(name, module, states, merge=number > 0)
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
                _shape_empty_states(module, self.world)
        # Each module reduces its own states over the ranks.
        return {name: _scalar(name, module.compute()) for name, module in self._modules.items()}


def _metrics_in(module: Metric) -> list[tuple[str, Any]]:
    """A torchmetrics metric and those inside it, by path."""
    return [
        (path, metric) for path, metric in module.named_modules() if hasattr(metric, "metric_state")
    ]


def _shape_empty_states(module: Metric, world: World) -> None:
    """Give the lists of outputs that a metric keeps (AUROC) an empty tensor of the right form on
    ranks without a sample.

    torchmetrics gathers float32 of shape ``[0]`` from such a rank, whatever the others hold, which
    ends their processes.
    """
    lists = [
        (f"{path}:{name}", metric, name)
        for path, metric in _metrics_in(module)
        for name, value in metric.metric_state.items()
        if isinstance(value, list)
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


def _states(module: Metric) -> dict[str, torch.Tensor]:
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


def _take_up_states(
    name: str, module: Metric, states: Mapping[str, torch.Tensor], merge: bool
) -> None:
    """Give `module` the states that `_states` gave of another, or merge them into its own."""
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


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    raise UserError(
        f"metric '{name}' computed {type(value).__name__} {getattr(value, 'shape', '')}; only "
        "single numbers can be reported, set average=…"
    )


def _rows(output: Any, target: Any) -> int:
    """Samples of a batch: the first dimension of the output or the target, of the one that is a
    tensor and no tree of them."""
    whole = (value for value in (output, target) if isinstance(value, torch.Tensor))
    for tensor in itertools.chain(whole, _tensors(output), _tensors(target)):
        if tensor.dim():  # a loss among the outputs has none
            return len(tensor)
    raise UserError(
        f"cannot tell how many samples a model's output of type {type(output).__name__} and a "
        "target of type "
        f"{type(target).__name__} hold; return tensors whose first dimension is the batch"
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
