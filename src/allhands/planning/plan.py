"""Which strategies fit on a number of GPUs, and how fast each would be."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from allhands.checks import check_choice, check_whole
from allhands.errors import UserError
from allhands.loop.trainable import check_cast
from allhands.planning.candidates import Candidate, candidates
from allhands.planning.cpu_timing import PipelineSimulation, cpu_step_time
from allhands.planning.derived_steps import Taken, taken
from allhands.planning.dry_step import DryStep, Workload
from allhands.planning.forecast import Prediction
from allhands.planning.forked import in_forked
from allhands.planning.machines import CPU, Card, Links, bytes_of, card_named, links_named
from allhands.planning.measured_links import MeasuredLinks
from allhands.planning.operation_times import OperationTimes
from allhands.planning.plan_text import text_of
from allhands.planning.real_servers import exchange_seconds
from allhands.planning.real_steps import correction_of, launch_of, own_seconds
from allhands.planning.scaling import SIZES, ScalingPlan, scaling
from allhands.planning.server_load import load_of, without_servers
from allhands.planning.step_recorder import GroupRanks
from allhands.planning.timing import (
    CAPTURED_S,
    EAGER_S,
    LateExchange,
    Places,
    StepTime,
    mean_beside_steps,
    pipeline_time,
    step_time,
    without_late,
)
from allhands.report.figures import require_matplotlib
from allhands.step import STEPS
from allhands.strategies.degrees import Degrees
from allhands.world.allocator import keep_freed_memory

# Memory that the process itself takes of a card beside PyTorch's tensors: the CUDA context with the
# kernels of its libraries, as on an H200, and the buffers of NCCL for a group.
_CONTEXT = 1400 * 10**6
_NCCL = 200 * 10**6
# What a process takes that has imported PyTorch and this package, as trainings of small models say.
_PROCESS = 300 * 2**20
# Of a pipeline's schedule: by how much of a stage's time it waits, for p ranks, m micro-batches and
# v stages a rank.
_BUBBLES = {
    "gpipe": lambda p, m, v: (p - 1) / m,
    "1f1b": lambda p, m, v: (p - 1) / m,
    "interleaved": lambda p, m, v: (p - 1) / (v * m),
    "zero_bubble": lambda p, m, v: (p - 1) / (3 * v * m),
}


@dataclass(frozen=True)
class TrainingPlan:
    """The ways of a training on a number of GPUs, the fastest that fits first.

    Attributes:
        rows: predictions.
        gpus: how many.
        card: of which kind.
        assumptions: what the times stand on, in words.
    """

    rows: list[Prediction]
    gpus: int
    card: Card
    assumptions: str
    _over: Callable[[Sequence[int]], ScalingPlan] = field(repr=False, compare=False)

    @property
    def best(self) -> Prediction | None:
        """The fastest that fits and computes what one process would; where none does, the fastest
        that fits; None where nothing fits."""
        fitting = [row for row in self.rows if row.fits]
        return next((row for row in fitting if row.exact), fitting[0] if fitting else None)

    def run_file(self) -> str:
        """What a run file says for the best; "" where nothing fits."""
        if self.best is None:
            return ""
        return yaml.safe_dump(self.best.lines, sort_keys=False)

    def over(self, gpus: Sequence[int] = SIZES) -> ScalingPlan:
        """The same training on other numbers of GPUs; takes a few times as long as this plan.

        Args:
            gpus: the numbers; by default ten from 1 to 10,000. Strategies of the plan that were
                named are not looked at, but all that may be.
        """
        return self._over(gpus)

    def plot(self, path: str | Path | None = None, gpus: Sequence[int] = SIZES) -> Any:
        """Draw the time of a step and the memory of each strategy over the number of GPUs.

        Args:
            path: where to write the picture, as .png, .svg or .pdf; None writes none.
            gpus: as for `over`.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            UserError: matplotlib is not installed, or the file cannot be written.
        """
        require_matplotlib()
        return self.over(gpus).plot(path)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain data: bytes, seconds and samples a second."""
        return {
            "gpus": self.gpus,
            "card": self.card.name,
            "assumptions": self.assumptions,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        title = f"{self.gpus} x {self.card.name}"
        return text_of(self.rows, title, self.assumptions, self.best, self.run_file())


def plan(
    *,
    model: Any,
    criterion: Any,
    optimizer: Any,
    batch: Any,
    gpus: int,
    card: str = "h100",
    memory: str | float | None = None,
    link: str | MeasuredLinks = "nvlink+ib400",
    per_host: int = 8,
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    step: str = "auto",
    runner: Any = None,
    keeps_outputs: bool = False,
    servers: int = 0,
    strategies: Iterable[Candidate] | None = None,
    own: Candidate | None = None,
    times: OperationTimes | None = None,
    processes: int = 1,
) -> TrainingPlan:
    """Predict memory, bytes and step time of a training on GPUs that need not be there.

    For each strategy one rank takes two steps in this process, with the code of a training, on
    tensors without data; of a pipeline's stages the first two and the last. Memory is what PyTorch
    would hold at once in the second, in blocks as its allocator gives them out, with cuBLAS's
    workspaces. Times are of operations, by the card's published peaks or as `times` has measured
    them, and of collectives, by a latency for each step of a tree and the bandwidth of a ring.

    Args:
        model: on any device; on the meta device it takes no memory.
        criterion: as for `SupervisedRunner.train`.
        optimizer: over the model's parameters.
        batch: what each share of the samples is in a micro-batch, on any device.
        gpus: how many there would be, at least 1.
        card: of which kind, such as "h200", "h100", "a100", "l40s"; "cpu" is a core of this
            machine, over gloo.
        memory: bytes of one, or such as "80GB"; None takes the card's.
        link: within a host and between hosts, such as "nvlink+ib400"; or bandwidths, "12.5GB/s";
            or what `allhands doctor --profile` has measured.
        per_host: GPUs of a host.
        precision, accumulate, clip_norm, step: as for `train`; what compiling changes is not known.
        runner: calls the model on a batch; None is `SupervisedRunner()`.
        keeps_outputs: metrics take the outputs of a captured step when it is over.
        servers: look at so many parameter servers too, each on a host of its own.
        strategies: what to look at; None takes all that may fit, with layers that are computed
            again where one does not fit otherwise.
        own: a further one to look at, such as that of a run file.
        times: of operations on the card; None takes its published peaks.
        processes: how many look at strategies at once. More than one are forked, as for a script
            that plans and does nothing else; times that are measured are so in this process.

    Returns:
        The plan, which prints as a table.

    Raises:
        UserError: a card, link, size or number that there is not; a model that no strategy can
            train.
    """
    check_whole("gpus", gpus)
    check_whole("per_host", per_host)
    check_whole("servers", servers, 0)
    check_choice("step", step, STEPS)
    if precision == "fp8":
        raise UserError(
            "precision='fp8': a plan knows no times of its products; write precision='bf16-true', "
            "which holds as much in memory"
        )
    chosen, links = card_named(card), links_named(link) if isinstance(link, str) else link
    limit = chosen.memory if memory is None else bytes_of(memory)
    if runner is None:
        from allhands.runner import SupervisedRunner

        runner = SupervisedRunner()
    workload = Workload(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        batch=batch,
        samples=samples_of(runner, batch),
        runner=runner,
        precision=precision,
        accumulate=accumulate,
        clip_norm=clip_norm,
        step=step,
        backend="gloo" if chosen.name == CPU else "nccl",
        keeps_outputs=keeps_outputs,
    )
    times = times or OperationTimes(chosen)
    if times.card.name != chosen.name:
        raise UserError(
            f"the times are of {times.card.name}, and the plan is for {chosen.name}; write "
            f"card={times.card.name!r}"
        )
    if chosen.name == CPU:
        if times.device is not None:
            keep_freed_memory(os.environ)  # as workers do
            times.correction = correction_of(workload, times)
        elif not times.known:
            raise UserError(
                "card 'cpu' has no published peaks; write --measure, or --profile FILE of a "
                "machine like those of the training; from Python, "
                "times=OperationTimes(card_named('cpu'), device=torch.device('cpu'))"
            )
    elif times.device is not None and times.device.type == "cuda":
        times.launch = launch_of(workload, times.device)

    def look(one: Candidate, number: int = gpus, take: Taken = taken) -> list[Prediction]:
        found = [_predict(workload, one, number, per_host, times, links, limit, take)]
        if strategies is None and not (one.recompute or found[0].refused or found[0].fits):
            again = replace(one, recompute=True)
            found.append(_predict(workload, again, number, per_host, times, links, limit, take))
        return found

    def look_alone(one: Candidate) -> tuple[list[Prediction], int]:
        before = times.by_peaks
        return look(one), times.by_peaks - before

    def over(numbers: Sequence[int]) -> ScalingPlan:
        return scaling(look, numbers, per_host, limit, chosen.name, at_once)

    at_once = 1 if times.device is not None else processes
    ways = list(candidates(gpus, per_host, servers) if strategies is None else strategies)
    if own is not None and own.name not in [one.name for one in ways]:
        ways.append(own)
    seen = in_forked(look_alone, ways, at_once)
    rows = [row for found, _ in seen for row in found]
    by_peaks = sum(count for _, count in seen)
    rows.sort(key=lambda row: (not row.fits, bool(row.refused), -row.samples_per_second))
    if all(row.refused for row in rows):
        raise UserError(f"no strategy can train this on {gpus} GPUs: {rows[0].refused}")
    assumed = _assumptions(chosen, link, per_host, times, by_peaks)
    return TrainingPlan(rows, gpus, chosen, assumed, over)


def samples_of(runner: Any, batch: Any) -> int:
    """How many samples a batch holds."""
    count = runner.rows_of(batch)
    if not count:
        raise UserError(
            "how many samples the batch holds cannot be told; override rows_of in your runner"
        )
    return int(count)


def _predict(
    workload: Workload,
    candidate: Candidate,
    gpus: int,
    per_host: int,
    times: OperationTimes,
    links: Links | MeasuredLinks,
    limit: float,
    take: Taken,
) -> Prediction:
    strategy, degrees = candidate.strategy, candidate.degrees(gpus)
    samples = workload.samples * workload.accumulate * degrees.dp
    lines: dict[str, Any] = {**candidate.sections, "workers": gpus}
    if candidate.recompute:
        lines["activation_checkpointing"] = candidate.recompute
        workload = replace(workload, activation_checkpointing=candidate.recompute)
    on_cpus = times.card.name == CPU
    # Of a pipeline's stages the first has the embedding, the last the head, and of those between
    # them the second the most micro-batches at once.
    ranks = sorted({0, gpus // degrees.pp, gpus - 1}) if degrees.pp > 1 else [0]
    if on_cpus and degrees.pp == gpus:
        ranks = list(range(gpus))
    try:
        strategy.check_size(gpus)
        check_cast(strategy, workload.precision, bool(workload.activation_checkpointing))
        steps_of_ranks = [take(workload, candidate, gpus, rank, per_host) for rank in ranks]
    except (UserError, ValueError) as error:
        return Prediction(candidate.name, lines, {}, None, 0.0, 0.0, samples, limit, str(error))
    fullest = max((step for steps in steps_of_ranks for step in steps), key=lambda step: step.peak)
    own = _beside(times.card, degrees, gpus)
    if on_cpus and times.device is not None and degrees.tp * degrees.shard > 1 == degrees.pp:
        times.own[candidate.name] = own_seconds(workload, strategy, gpus, per_host, times.in_step)
    servers = load_of(strategy, fullest, workload)
    if servers is not None and on_cpus and times.device is not None:
        exchange = exchange_seconds(workload, strategy, gpus, local=gpus <= per_host)
        if exchange is not None:
            times.own[candidate.name] = exchange
    own_code = times.own.get(candidate.name)
    found, late = [], []
    for kind in zip(*steps_of_ranks, strict=True):  # those of one kind, on each rank
        steps, share = list(kind), kind[0].share
        places = [_places(step.groups, per_host, degrees) for step in steps]
        if strategy.overlap:
            steps[0], transfers = without_late(steps[0])
            late.append((share, LateExchange.of(transfers, links, places[0])))
        if servers is not None:
            steps[0] = without_servers(steps[0])
        seconds = (_cpu_time if on_cpus else _gpu_time)(steps, times, links, places, strategy)
        if servers is not None:
            waits = servers.waiting(kind[0], seconds.total, links, per_host, own_code)
            waits += 0.0 if servers.alone else times.correction.later(seconds.compute, gpus)
            seconds = replace(seconds, waiting=seconds.waiting + waits)
        elif own_code is not None:
            seconds = replace(seconds, compute=seconds.compute + own_code)
        found.append((share, seconds))
    sent, received = max(map(_traffic, steps_of_ranks))
    return Prediction(
        candidate.name,
        lines,
        fullest.kinds | own,
        mean_beside_steps(found, late, strategy.overlap),
        sent,
        received,
        samples,
        limit,
        note=_note(steps_of_ranks[0]),
        exact=strategy.exact_for(workload.optimizer, workload.clip_norm),
        servers=servers,
    )


def _gpu_time(
    steps: Sequence[DryStep],
    times: OperationTimes,
    links: Links | MeasuredLinks,
    places: Sequence[Places],
    strategy: Any,
) -> StepTime:
    eager = EAGER_S if times.launch is None else times.launch
    launch = CAPTURED_S if steps[0].captured else eager
    if len(steps) == 1:
        return step_time(steps[0], times, links, places[0], launch)
    waits = _bubble(strategy, steps[0].workers)
    return pipeline_time(steps, times, links, places, launch, waits)


def _cpu_time(
    steps: Sequence[DryStep],
    times: OperationTimes,
    links: Links | MeasuredLinks,
    places: Sequence[Places],
    strategy: Any,
) -> StepTime:
    if len(steps) == 1:
        return cpu_step_time(steps[0], times, links, places[0])
    simulated = PipelineSimulation(steps, times, links, places).run()
    if simulated is not None:
        return simulated
    return pipeline_time(steps, times, links, places, 0.0, _bubble(strategy, steps[0].workers))


def _bubble(strategy: Any, workers: int) -> float:
    """By how much of its own time a stage waits."""
    pipeline, stages = getattr(strategy, "pipeline", strategy), strategy.degrees_for(workers).pp
    count = pipeline.microbatches or stages
    return _BUBBLES[pipeline.schedule](stages, count, pipeline.stages_per_worker)


def _traffic(steps: Sequence[DryStep]) -> tuple[float, float]:
    """Bytes that a rank sends and receives in a step, the mean over kinds of steps."""
    return (
        math.fsum(step.share * one.sent for step in steps for one in step.transfers),
        math.fsum(step.share * one.received for step in steps for one in step.transfers),
    )


def _note(kinds: Sequence[DryStep]) -> str:
    share = sum(step.share for step in kinds if step.transfers)
    if len(kinds) == 1:
        return ""
    return f"{100 * share:.3g} % of the steps exchange weights; bytes and ms are the mean of a step"


def _beside(card: Card, degrees: Degrees, gpus: int) -> dict[str, int]:
    """Bytes that libraries take of a card, beside tensors."""
    if card.name == CPU:
        return {"process": _PROCESS}
    groups = sum(degree > 1 for degree in degrees) + (gpus > 1)
    return {"libraries": card.libraries, "CUDA and NCCL": _CONTEXT + _NCCL * groups}


def _places(groups: GroupRanks, per_host: int, degrees: Degrees) -> Places:
    hosts = {name: len({rank // per_host for rank in ranks}) for name, ranks in groups.items()}
    blocking = set()
    for name, ranks in groups.items():
        neighbours = max(ranks) - min(ranks) + 1 == len(ranks) == degrees.tp
        if degrees.tp > 1 and neighbours:
            blocking.add(name)
    return Places(hosts, frozenset(blocking))


def _assumptions(
    card: Card, link: str | MeasuredLinks, per_host: int, times: OperationTimes, by_peaks: int
) -> str:
    by = f"the published peaks of {card.name}, not measured"
    if times.known:
        by = f"{len(times.known)} measured operations"
        if by_peaks:
            by += f", and for others by the published peaks of {card.name}"
    if not isinstance(link, str):
        link = "as measured"
    return f"times by {by}; {per_host} GPUs a host, link {link}"
