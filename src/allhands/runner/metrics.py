"""Losses and metrics over whole loaders: sums and counts, reduced once, every sample exactly
once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allhands.comm import all_gather_rows, all_gather_text, all_reduce_sum, broadcast_tensors, calls
from allhands.errors import UserError, kind_of
from allhands.step import NonFiniteLossError
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


class LoaderMetrics:
    """The loss and the metrics of one loader, over one epoch.

    On a CPU every loss is read at once, and a training loss that is not finite raises before it
    reaches the weights. On other devices the sums stay on the device; `check_finite` reads them.

    Args:
        metrics: by name.
        world: the processes.
        trains: whether the loader is trained on.
        counts: False where another rank sees the same samples, and its sums are those that count.
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
        self.world = world
        self.counts = counts
        self.slices = slices
        self.trains = trains
        self.where = ""
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
        self._on_cpu = world.device.type == "cpu"
        self.start("")

    def start(self, where: str) -> None:
        """Begin an epoch; `where` names it in errors."""
        self.where = where
        self.samples = 0
        self.batches = 0
        self._loss = (
            0.0 if self._on_cpu else torch.zeros((), dtype=torch.float64, device=self.world.device)
        )
        self._count: Any = 0.0
        self._shared = float("nan")
        self._sums = dict.fromkeys(self._functions, 0.0)
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._kept = 0
        for module in self._modules.values():
            module.reset()

    def observe(
        self, output: Any, target: Any, loss: torch.Tensor, factor: float, count: Any
    ) -> None:
        """Take in one micro-batch: ``loss * factor`` is its sum of losses over `count` items."""
        self.batches += 1
        if self._on_cpu:
            value = loss.item()
            if self.trains and not math.isfinite(value):
                self._raise_non_finite(value, self.world.rank)
            self._loss += value * factor
        else:
            self._loss += loss.detach() * factor
        self._count += count
        if self.slices is not None and (self._functions or self._modules):
            output = self.slices.full_output(output)
        if self.counts and (self._functions or self._modules):
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

    def running_loss(self) -> float:
        """The mean loss on this rank so far, or what `share_loss` has told where it has none. Reads
        the device."""
        count = float(self._count)
        return float(self._loss) / count if count else self._shared

    def share_loss(self) -> None:
        """Tell the ranks that have no losses of their own the mean over the others; all ranks call
        it together."""
        mine = [
            torch.as_tensor(v if self.counts else 0.0, dtype=torch.float64)
            for v in (self._loss, self._count)
        ]
        totals = torch.stack([value.to(self.world.device).reshape(()) for value in mine])
        all_reduce_sum([totals], self.world)
        loss, count = totals.tolist()
        self._shared = loss / count if count else float("nan")

    def check_finite(self) -> None:
        """Raise `NonFiniteLossError` on all ranks when a training loss of any rank since `start`
        was not finite.

        Reads the device, and asks the other ranks where losses are not looked at one by one
        (`observe`).
        """
        if not self.trains:
            return
        value = float(self._loss)
        if self._on_cpu or self.world.world_size == 1:
            ranks = [] if math.isfinite(value) else [self.world.rank]
        else:
            calls.note("looking at the loss")
            mine = torch.tensor(
                [not math.isfinite(value)], dtype=torch.int32, device=self.world.device
            )
            ranks = [rank for rank, bad in enumerate(all_gather_rows(mine, self.world)) if int(bad)]
        if ranks:
            self._raise_non_finite(value if self.world.rank in ranks else float("nan"), ranks[0])

    def _raise_non_finite(self, value: float, rank: int) -> None:
        on_rank = f" on rank {rank}" if self.world.world_size > 1 else ""
        raise NonFiniteLossError(
            f"the training loss is {value}{on_rank} ({self.where}, batch {self.batches}). The "
            "weights of the last checkpoint are untouched. Usual causes: a learning rate too high, "
            "a target or input that is not finite, a logarithm or division by zero; clip_norm=1.0 "
            "bounds the step"
        )

    def partial(self) -> dict[str, torch.Tensor]:
        """What this rank has measured since `start`, for a checkpoint."""
        numbers = [self.batches, self.samples, self._loss, self._count, *self._sums.values()]
        if not self.counts:
            numbers = [0.0] * len(numbers)
        parts = {
            "numbers": torch.stack(
                [torch.as_tensor(n, dtype=torch.float64).reshape(()).cpu() for n in numbers]
            )
        }
        # What is kept for the next group stays as it is, so that sums are rounded as they would
        # have been without the save.
        for number, (output, target) in enumerate(zip(self._outputs, self._targets, strict=True)):
            parts[f"output/{number}"], parts[f"target/{number}"] = output, target
        for name, module in self._modules.items():
            parts |= {f"module/{name}/{key}": value for key, value in _states(module).items()}
        return parts

    def take_up(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Continue from what `partial` gave on one rank, or on several whose sums this rank takes
        over.

        Raises:
            UserError: a metric's states cannot be put together.
        """
        for number, part in enumerate(parts):
            batches, samples, loss, count, *sums = part["numbers"].to(self.world.device)
            self.batches += int(batches)
            self.samples += int(samples)
            self._loss += loss.item() if self._on_cpu else loss
            self._count += count.item() if self._on_cpu else count
            for name, value in zip(self._sums, sums, strict=True):
                self._sums[name] = self._sums[name] + value
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
        calls.note(("metrics of", self.where))
        sums = [self._loss, self._count, self.samples, self.batches > 0, *self._sums.values()]
        if not self.counts:
            sums = [0.0] * len(sums)
        totals = torch.stack(
            [
                torch.as_tensor(v, dtype=torch.float64, device=self.world.device).reshape(())
                for v in sums
            ]
        )
        all_reduce_sum([totals], self.world)
        loss, count, samples, ranks, *functions = totals.tolist()
        if not ranks:
            purpose = "train on" if self.trains else "evaluate"
            raise UserError(
                f"there was no batch to {purpose} ({self.where}): the loader has drop_last=True "
                "and fewer samples than a global batch (batch_size x workers x accumulate), or an "
                "empty stream. Write drop_last=False, or a smaller batch_size"
            )
        if ranks < self.world.world_size:
            for module in self._modules.values():
                _shape_empty_states(module, self.world)
        # Each module reduces its own states over the ranks.
        computed = {name: _scalar(name, module.compute()) for name, module in self._modules.items()}
        values = {"loss": loss / count if count else float("nan")}
        values |= {
            name: total / samples if samples else float("nan")
            for name, total in zip(self._sums, functions, strict=True)
        }
        values |= computed
        numbers = torch.tensor(list(values.values()), dtype=torch.float64, device=self.world.device)
        # Decisions hang on these: they must be equal to the last bit.
        broadcast_tensors([numbers], self.world)
        return dict(zip(values, numbers.tolist(), strict=True))


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
