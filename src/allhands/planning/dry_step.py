"""A step of one rank of any world, in this process, on tensors without data.

The strategy, its exchange and the optimizer's step are those of a training; only the group's
messages go nowhere, and nothing is computed. So what is measured is what a training does.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from allhands.comm.traffic import Collective
from allhands.compat import FakeStore, chunks_on_demand
from allhands.data import map_tensors, tensors_in
from allhands.errors import UserError
from allhands.loop.optimizer_group import OptimizerGroup
from allhands.loop.recomputing import recomputing
from allhands.loop.settings import Data, LoopSettings
from allhands.loop.task import Objective, Task
from allhands.planning.cuda_casts import CudaCasts
from allhands.planning.dry_servers import dry_servers
from allhands.planning.operation import Operation
from allhands.planning.step_recorder import (
    BACKWARD,
    ELSEWHERE,
    FORWARD,
    MADE,
    UPDATE,
    GroupRanks,
    StepRecorder,
    storage_resizing,
)
from allhands.runner.evaluation import Forward
from allhands.step import LossRule
from allhands.step.guards import where_raised
from allhands.step.mean_check import MeanCheck
from allhands.strategies import Strategy
from allhands.world import World

_CPU = torch.device("cpu")
# What is held by the phase in which it came, where it is nothing that has a name.
_KINDS = {FORWARD: "activations", BACKWARD: "temporary", UPDATE: "temporary", MADE: "buffers"}


@dataclass(frozen=True)
class Workload:
    """What is trained, without who trains it.

    Attributes:
        model, criterion, optimizer: as for `allhands.SupervisedRunner.train`; weights on the meta
            device are enough.
        batch: what each worker takes in a micro-batch.
        samples: how many samples that is.
        runner: calls the model on a batch.
        precision, accumulate, clip_norm, activation_checkpointing, step: as for `train`.
        keeps_outputs: metrics take the outputs of a captured step when it is over.
        backend: "nccl", or "gloo" for ranks on processors.
    """

    model: nn.Module
    criterion: Any
    optimizer: torch.optim.Optimizer
    batch: Any
    samples: int
    runner: Any
    precision: str = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    activation_checkpointing: Any = False
    step: str = "auto"
    backend: str = "nccl"
    keeps_outputs: bool = False


@dataclass(frozen=True)
class DryStep:
    """What one rank does in a step, after the first.

    Attributes:
        peak: the most bytes that it holds at once.
        kinds: of these, bytes by kind: "weights", "gradients", "optimizer", "activations",
            "buffers" (of the exchange), "input" and "temporary".
        events: phase, and operation or collective, in their order.
        groups: the ranks of the groups that they use.
        captured: its steps can be captured in CUDA graphs.
        workers: ranks of the world.
        share: of all steps of a training, those that are like this one.
        at_start: bytes that the rank holds before the first step of all.
    """

    peak: int
    kinds: dict[str, int]
    events: list[tuple[str, Operation | Collective]]
    groups: GroupRanks
    captured: bool
    workers: int = 1
    share: float = 1.0
    at_start: int = 0

    @property
    def transfers(self) -> list[Collective]:
        return [event for _, event in self.events if isinstance(event, Collective)]


def dry_steps(
    workload: Workload,
    strategy: Strategy,
    workers: int,
    rank: int = 0,
    per_host: int = 8,
) -> list[DryStep]:
    """Take some steps of one rank, and tell what each kind of step does; most strategies have one.

    Args:
        workload: what is trained.
        strategy: by which.
        workers: how many ranks there would be.
        rank: which of them takes the steps.
        per_host: workers of a host.

    Raises:
        UserError: the strategy cannot train this with so many workers; the model needs the numbers
            in its tensors; this process is in a world already.
    """
    backend = workload.backend
    with ExitStack() as stack:
        world = stack.enter_context(dry_world(strategy, workers, rank, per_host, backend))
        stack.enter_context(dry_servers(getattr(strategy, "servers", None) or 0, rank, workers))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        recorder = StepRecorder(mode)
        model, optimizer, batch = _without_data(workload, mode, on_gpu=backend == "nccl")
        stack.callback(storage_resizing(recorder))
        stack.enter_context(chunks_on_demand())
        if backend == "nccl":
            stack.enter_context(CudaCasts())
        stack.enter_context(warnings.catch_warnings())
        # Addresses tell which tensors share memory; nothing is read there.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(recorder)
        try:
            return _taken(workload, strategy, world, recorder, model, optimizer, batch)
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise UserError(
                f"a step on tensors without data fails with {type(error).__name__} ({said}) at "
                f"{where_raised(error)}; plan a model without what depends on the numbers in "
                "tensors, such as nonzero(), x[mask] or numpy()"
            ) from error


def dry_step(*args: Any, **options: Any) -> DryStep:
    """As `dry_steps`, of a strategy that has one kind of step."""
    (step,) = dry_steps(*args, **options)
    return step


class _NoCheck(MeanCheck):
    """Takes a criterion of the user's for a mean: tensors without data cannot show it."""

    waits = False

    def look(self, output: Any, target: Any) -> None:
        pass


def bound(
    workload: Workload,
    strategy: Strategy,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> tuple[OptimizerGroup, Objective]:
    """A strategy that is bound to a model and its optimizer, and what its steps compute."""
    settings = LoopSettings(
        model=model,
        optimizer=optimizer,
        data=Data(optional=True),
        precision=workload.precision,
        accumulate=workload.accumulate,
        clip_norm=workload.clip_norm,
        strategy=strategy,
        activation_checkpointing=workload.activation_checkpointing,
    )
    runner = workload.runner
    task = Task(
        lambda module, batch: Forward(runner, module, world.device)(batch),
        workload.criterion,
        runner.rows_of,
    )
    group = OptimizerGroup(settings, world, task, _no_trial, lambda _: None)
    rule = LossRule(workload.criterion)
    target = workload.batch[-1] if isinstance(workload.batch, (tuple, list)) else None
    if runner.takes_last_as_target and isinstance(target, torch.Tensor) and not target.is_meta:
        rule.use_samples_if_equal(target)  # as all targets, of which these are some
    if rule.pairs is None:
        rule.look_with(lambda: _NoCheck(workload.criterion))
    else:
        rule.leave_unchecked()
    if group.placement.slices is not None:
        rule.cut_over(group.placement.slices)
    forward = Forward(runner, group.called, world.device, workload.criterion)
    objective = Objective(forward, rule, runner.target_of, lambda: lambda *_: None)
    return group, objective


def _taken(
    workload: Workload,
    strategy: Strategy,
    world: World,
    recorder: StepRecorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> list[DryStep]:
    for tensor in [*model.parameters(), *model.buffers()]:
        if strategy.takes_meta:  # the strategy makes what the rank holds of it
            recorder.storages.add_elsewhere(tensor)
        else:
            recorder.storages.add(tensor, MADE)
    for tensor in _floating(batch):
        recorder.storages.add(tensor, MADE)
    group, objective = bound(workload, strategy, world, model, optimizer)
    gradients: set[int] = set()

    def before(*_: Any) -> None:
        recorder.phase = UPDATE
        gradients.update(recorder.storages.numbers(p.grad for p in group.model.parameters()))

    _call_before_update(group, before)
    parts = workload.accumulate
    counts = [workload.samples] * parts
    captured = workload.step != "eager" and strategy.capture_refused(model, world) is None
    at_start = recorder.storages.held
    # A captured step is captured of one copy of a batch, and reads another.
    inputs = [batch, *(map_tensors(batch, torch.empty_like) for _ in range(2 * captured))]
    outputs: list[Any] = []
    first, kinds = strategy.kinds_of_step()
    period = sum(kinds.values())
    found: list[DryStep] = []
    following: int | None = None
    for number in (*first, *kinds):
        if number != following:
            group.begin(number)
            group.train()
            take = group.step_for(objective)
            take.before_first_update = None
            if captured and workload.keeps_outputs:
                take.observe = lambda *values: outputs.append(values)
        following = number + 1
        recorder.phase, recorder.records = FORWARD, number in kinds
        outputs.clear()
        if recorder.records:
            recorder.forget()
        with group.precision.of_calls(group.model), recomputing(group):
            take([batch] * parts, counts, sum(counts) * group.placement.shares, False)
        if recorder.records:
            kinds_held = _held_by_kind(recorder, group, gradients, inputs)
            found.append(
                DryStep(
                    recorder.storages.peak,
                    kinds_held,
                    recorder.events,
                    recorder.groups,
                    captured,
                    world.world_size,
                    kinds[number] / period,
                    at_start,
                )
            )
    return found


def _call_before_update(group: OptimizerGroup, before: Any) -> None:
    """Have something called before the optimizer's step, or before an exchange that takes it."""
    if not group.strategy.takes_step:
        group.optimizer.register_step_pre_hook(before)
        return
    plain = group.exchange.exchange_all

    def exchange_all(*args: Any) -> bool:
        before()
        return plain(*args)

    group.exchange.exchange_all = exchange_all  # type: ignore[method-assign,assignment]


def _held_by_kind(
    recorder: StepRecorder, group: OptimizerGroup, gradients: set[int], inputs: Any
) -> dict[str, int]:
    storages, model = recorder.storages, group.model
    states = (value for state in group.optimizer.state.values() for value in state.values())
    kinds = {
        "weights": storages.numbers([*model.parameters(), *model.buffers()]),
        "optimizer": storages.numbers([*states, *group.exchange.states_elsewhere]),
        "gradients": gradients,
        "input": storages.numbers(_floating(inputs)),
    }
    found: Counter[str] = Counter()
    for kind, size in storages.by_kind(kinds).items():
        if kind != ELSEWHERE:
            found[_KINDS.get(kind, kind)] += size
    return dict(found)


@contextmanager
def dry_world(
    strategy: Strategy, workers: int, rank: int, per_host: int, backend: str
) -> Iterator[World]:
    """A world for a strategy, whose messages go nowhere."""
    if dist.is_initialized():
        raise UserError(
            "a plan needs a process of its own, and this one is a worker of a world; plan before "
            "allhands.init, or in another process"
        )
    hook = sys.excepthook
    if workers > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=workers)
        sys.excepthook = hook  # PyTorch's would put the rank before every line of an error
    host = min(per_host, workers)
    try:
        world = World(
            rank,
            rank % host,
            rank // host,
            workers,
            host,
            _CPU,
            backend if workers > 1 else "none",
            "plan",
        )
        if hasattr(strategy, "degrees_for") and workers > 1:
            strategy.degrees_for(workers).layout(world)
        yield world
    finally:
        if workers > 1:
            dist.destroy_process_group()


def _without_data(
    workload: Workload, mode: FakeTensorMode, on_gpu: bool
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Copies of the model, its optimizer and the batch, without data but for whole numbers."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)

    with mode:
        model, optimizer = copies(workload, like)
        for group in optimizer.param_groups if on_gpu else ():
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # the default there
        return model, optimizer, _mapped(workload.batch, like)


def copies(
    workload: Workload, like: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer with other tensors, which `like` makes of each."""
    copied, other = _copied(workload.model, workload.optimizer, like)
    # It lies where it is to be, and cannot be moved.
    copied.to = lambda *_: copied  # type: ignore[method-assign]
    return copied, other


def meta_copies(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer on the meta device, to be planned elsewhere."""
    return _copied(model, optimizer, lambda one: torch.empty_like(one, device="meta"))


def _copied(
    model: nn.Module, own: torch.optim.Optimizer, like: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(like(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = like(buffer)
    other = copy.copy(own)
    other.__dict__ = dict(own.__dict__)
    other._optimizer_step_pre_hooks = copy.copy(own._optimizer_step_pre_hooks)
    other.state = copy.copy(own.state)
    other.state.clear()
    other.param_groups = [
        {**group, "params": [memo[id(p)] for p in group["params"]]} for group in own.param_groups
    ]
    return copy.deepcopy(model, memo), other


def _mapped(batch: Any, like: Any) -> Any:
    return map_tensors(batch, lambda one: like(one) if one.is_floating_point() else one)


def _floating(batch: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(batch) if tensor.is_floating_point()]


def _no_trial(*_: Any) -> Any:
    raise UserError("a plan computes nothing, so that nothing can be measured; name a number")
