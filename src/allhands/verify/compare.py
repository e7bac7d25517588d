"""`allhands.verify`: the user's training alone and distributed, compared step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allhands.checks import check_whole, is_whole
from allhands.errors import AllhandsError, UserError, kind_of
from allhands.launch import idle_agents
from allhands.launch.signals import leaves_on_sigterm
from allhands.loop.settings import Data
from allhands.loop.workers import plan, world_around
from allhands.report import require_matplotlib
from allhands.runner import SupervisedRunner
from allhands.runner.train_settings import TrainSettings
from allhands.step.closure import takes_closure
from allhands.strategies import Strategy, strategy_named
from allhands.verify import causes, probes
from allhands.verify.noise import FACTOR, Difference, Noise, judge, nearest
from allhands.verify.recorder import ALL_GRADIENTS, ALL_PARAMETERS
from allhands.verify.report import DIFFERS, LOSSY, SAME, Report, Row
from allhands.verify.runner_runs import RunnerRuns, settings_to_check
from allhands.verify.runs import CannotVary, Runs, bytes_of
from allhands.verify.traces import Trace, Variation

# The reference run keeps the gradients and the parameters of every step; not more than this.
MEMORY = 2 << 30


@dataclass
class Baseline:
    """The training alone, on the global batches of some number of workers.

    Attributes:
        path: the file of the reference run's tensors.
        trace: the reference run.
        noise: what rounding explains.
        refused: runs alone that should differ from the reference by rounding only, and differ by
            more: what was changed in them, and where they differ first.
        notes: what could not be measured.
    """

    path: str
    trace: Trace
    noise: Noise
    refused: dict[str, Difference] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def verify(
    *,
    model: nn.Module | None = None,
    criterion: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    loaders: Any = None,
    datasets: Any = None,
    runner: SupervisedRunner | None = None,
    strategies: str | Strategy | Sequence[str | Strategy] = ("ddp",),
    workers: int | Sequence[int] = (1, 2),
    steps: int = 20,
    steps_per_epoch: int | None = None,
    evaluate_every: int | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: str = "fp32",
    seed: int = 42,
    plot: str | Path | None = None,
) -> Report:
    """Train for some steps alone and distributed, and compare samples, learning rates, losses,
    gradients, weights and buffers.

    For each strategy and number of workers the training runs in that many processes, and in one
    process on the same global batches, from the same weights. What rounding explains is measured:
    alone in float64, with the samples of each global batch in reverse order, and cut in
    micro-batches. A difference is real when it is more than 20 times that. The table is printed,
    with the causes of each difference below it.

    The objects are those of `SupervisedRunner.train`, and are left as they were. Nothing is written
    but the plot.

    Args:
        model: the bare module; None takes the runner's.
        criterion, optimizer, scheduler: as for `SupervisedRunner.train`.
        loaders, datasets: as there; those that are not trained on are left out, unless
            ReduceLROnPlateau needs one.
        steps_per_epoch, evaluate_every: as there; they say when schedules step.
        accumulate, clip_norm, precision, seed: as there.
        runner: for a `handle_batch` of your own, or another device.
        strategies: names of strategies or `Strategy` objects, one or several.
        workers: numbers of workers, one or several. "single" and "dp" are one process and take only
            1.
        steps: optimizer steps to compare. Fewer are compared when the reference run would need more
            than 2 GiB.
        plot: a PNG to draw the differences into.

    Returns:
        The report: ``ok``, ``rows``, ``table()``, ``save_plot(path)``.

    Raises:
        UserError: an argument cannot be honoured, or the training itself refuses to run so.
        WorkerError: a worker failed.
    """
    chosen = strategies_of(strategies)
    counts = _counts(workers)
    refuse_world_around()
    check_whole("steps", steps, unit="optimizer steps")
    if runner is not None and not isinstance(runner, SupervisedRunner):
        raise UserError(f"runner is {kind_of(runner)}; pass a SupervisedRunner, or leave it out")
    if plot is not None:
        require_matplotlib()
    runner = runner or SupervisedRunner()
    model = model if model is not None else runner.model
    objects = {
        "runner": runner,
        "model": model,
        "criterion": criterion,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": Data(loaders, datasets),
        "seed": seed,
        "steps_per_epoch": steps_per_epoch,
        "evaluate_every": evaluate_every,
        "accumulate": accumulate,
        "clip_norm": clip_norm,
        "precision": precision,
    }
    if isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        probes.refuse_strangers(model, optimizer)
    settings = settings_to_check(objects, 1)
    settings.validate()
    _check_all(settings, chosen, counts, runner.device)
    compared, notes = steps_that_fit(bytes_of(settings.model), steps)
    # Some runs follow one another: torch is imported once for all of them.
    with leaves_on_sigterm(), idle_agents.kept(60.0), contextlib.ExitStack() as stack:
        runs = stack.enter_context(contextlib.closing(RunnerRuns(objects, runner.device)))
        report = compare(runs, chosen, counts, compared)
    report.notes = notes + report.notes
    return show(report, plot)


def _check_all(
    settings: TrainSettings, chosen: Sequence[Strategy], counts: Sequence[int], device: str | None
) -> None:
    """Refuse now what a strategy would refuse after the first runs."""
    if takes_closure(settings.optimizer):
        raise UserError(
            f"{type(settings.optimizer).__name__} computes the loss several times in one step, by "
            "a closure, and verify compares one gradient a step; verify the training with an "
            "optimizer that takes one, such as torch.optim.SGD"
        )
    for strategy in chosen:
        strategy.check_settings(settings)
        for count in counts:
            plan(strategy, count, device)
            strategy.check_training(settings, count)


def refuse_world_around() -> None:
    """Raise `UserError` in a process that is part of a world."""
    if world_around():
        raise UserError(
            "verify starts the worlds that it compares, and this process is one of a world of "
            f"{world_around()} already; run it "
            "in one process, without torchrun, srun, mpirun or `allhands launch`"
        )


def show(report: Report, plot: str | Path | None) -> Report:
    """Print the table, and draw the plot if there is to be one."""
    print(report.table())
    if plot is not None:
        report.save_plot(plot)
    return report


def compare(runs: Runs, strategies: list[Strategy], counts: list[int], steps: int) -> Report:
    """The report of a training with each strategy and number of workers."""
    rows, notes = [], []
    for workers in counts:
        baselines: dict[int, Baseline] = {}
        for strategy in strategies:
            shares = strategy.shares(workers)  # into which the samples are dealt out
            if shares not in baselines:
                baselines[shares] = _baseline(runs, shares, steps)
                notes += [note for note in baselines[shares].notes if note not in notes]
            baseline = baselines[shares]
            try:
                (trace,) = runs.distributed(strategy, workers, [(Variation(steps), baseline.path)])
            except UserError as error:
                raise UserError(
                    f"{strategy.name} with {workers} worker{'s' if workers > 1 else ''}: {error}"
                ) from None
            exact = runs.exact(strategy)
            row, finding = _row(strategy, workers, trace, baseline, exact)
            if finding is not None and row.verdict == DIFFERS:
                case = causes.Case(
                    runs,
                    strategy,
                    workers,
                    steps,
                    trace,
                    baseline.trace,
                    baseline.noise,
                    baseline.refused,
                    finding,
                    exact,
                )
                row.causes = causes.explain(case)
            rows.append(row)
        for baseline in baselines.values():
            runs.forget(baseline.path)
    rows.sort(key=lambda row: [strategy.in_words() for strategy in strategies].index(row.strategy))
    notes += runs.probe.notes()
    about = (
        f"{len(baseline.trace.steps)} optimizer steps distributed, against one process on the same "
        f"global batches; more than {FACTOR:g} times the noise is a difference"
    )
    if any(step["optimizer"] for step in baseline.trace.steps):
        about += "; the steps of each optimizer are counted for themselves"
    return Report(rows, about, notes)


def _row(
    strategy: Strategy, workers: int, trace: Trace, baseline: Baseline, exact: bool
) -> tuple[Row, Difference | None]:
    finding = judge(trace, baseline.trace, baseline.noise, exact)
    shown: Difference | None
    if finding is not None:
        verdict, shown = DIFFERS, finding
    elif exact:
        verdict, shown = SAME, nearest(trace, baseline.noise)
    else:
        last = trace.steps[-1]["distance"][ALL_PARAMETERS]
        number = len(trace.steps)
        verdict = LOSSY
        shown = Difference(
            number,
            ALL_PARAMETERS,
            last,
            baseline.noise.at(number - 1, ALL_PARAMETERS),
            "rounding",
            [],
        )
    curves = {}
    for kind, name in (("gradients", ALL_GRADIENTS), ("parameters", ALL_PARAMETERS)):
        curves[kind] = {
            "difference": [step["distance"][name] for step in trace.steps if "distance" in step],
            "limit": [
                FACTOR * baseline.noise.at(number, name) for number in range(len(trace.steps))
            ],
        }
    optimizer = trace.optimizer(shown.step - 1) if shown else ""
    row = Row(
        strategy.in_words(),
        workers,
        verdict,
        trace.number(finding.step - 1) if finding is not None else None,
        (f"{optimizer}: " if optimizer else "") + (shown.what if shown else ""),
        shown.difference if shown else 0.0,
        shown.noise if shown else 0.0,
        curves=curves,
    )
    return row, finding


def _baseline(runs: Runs, workers: int, steps: int) -> Baseline:
    """Run alone, and measure what rounding does to it."""
    path, trace = runs.reference(Variation(steps, alone_for=workers))
    noise = Noise(runs.subject.floor)
    baseline = Baseline(path, trace, noise)
    limit = runs.subject.plausible
    in_double = None
    if runs.subject.in_double:
        try:
            in_double = runs.alone(Variation(steps, alone_for=workers, double=True), path)
        except Exception as error:  # whatever the user's code says to float64
            if isinstance(error, AllhandsError) and not isinstance(error, CannotVary):
                raise
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            baseline.notes.append(
                f"the training cannot run in float64 ({text}), so the noise is that of other "
                "orders of summation only"
            )
        if in_double is not None and not _within(in_double, limit):
            baseline.notes.append(
                "in float64 the training draws other random numbers, so the noise is that of other "
                "orders of summation only"
            )
            in_double = None
        if in_double is not None:
            noise.add(in_double)
    others = {
        "repeated": Variation(steps, alone_for=workers),
        "reversed": Variation(steps, alone_for=workers, reverse=True),
    }
    cut = runs.cut(workers)
    if cut > 1:
        others["cut"] = Variation(steps, alone_for=workers, cut=cut)
    traces = {}
    for name, variation in others.items():
        with contextlib.suppress(CannotVary):
            traces[name] = runs.alone(variation, path)
    # All are judged by the same noise, whatever the order in which they ran.
    accepted = []
    for name, other in traces.items():
        found = judge(other, trace, noise) if in_double is not None else _implausible(other, limit)
        if found is None:
            accepted.append(other)
        else:
            baseline.refused[name] = found
    for other in accepted:
        noise.add(other)
    again = "repeated" in traces and "repeated" not in baseline.refused
    largest = nearest(traces["repeated"], noise) if again else None
    if largest is not None:
        baseline.notes.append(
            f"the training alone, run twice, is not the same to the bit (step {largest.step}, "
            f"{largest.what}: {largest.difference:.1e}). Kernels that add in no fixed order do "
            "that; torch.use_deterministic_algorithms(True) names them. It is part of the noise"
        )
    return baseline


def _within(trace: Trace, limit: float) -> bool:
    first = trace.steps[0]["distance"]
    return first["loss"] <= limit and first[ALL_GRADIENTS] <= limit


def _implausible(trace: Trace, limit: float) -> Difference | None:
    if _within(trace, limit):
        return None
    first = trace.steps[0]["distance"]
    what = "loss" if not first["loss"] <= limit else ALL_GRADIENTS
    return Difference(1, what, first[what], limit / FACTOR, "rounding", [])


# ---------------------------------------------------------------------- arguments

NOT_STEPS = (
    "federated training is compared by its rounds and not by optimizer steps: use "
    "allhands.verify.federated_rounds.verify_rounds, or "
    "`allhands verify` on a run file; or verify the model and the data with the strategy ddp"
)


def strategies_of(given: Any) -> list[Strategy]:
    """Strategies by name, or as they are."""
    items = [given] if isinstance(given, (str, Strategy, type)) else list(given)
    if not items:
        raise UserError("strategies is empty; write strategies=('ddp',)")
    chosen = []
    for item in items:
        if isinstance(item, str):
            chosen.append(strategy_named(item))
        elif isinstance(item, Strategy):
            if item.train_instead() is not None:
                raise UserError(f"strategies holds {type(item).__name__}: {NOT_STEPS}")
            chosen.append(item)
        elif isinstance(item, type) and issubclass(item, Strategy):
            raise UserError(f"strategies holds the class {item.__name__}; write {item.__name__}()")
        else:
            raise UserError(
                f"strategies holds {kind_of(item)}; write names such as 'ddp', or Strategy objects"
            )
    return chosen


def _counts(given: Any) -> list[int]:
    items = [given] if isinstance(given, int) else list(given)
    if not items:
        raise UserError("workers is empty; write workers=(1, 2)")
    for item in items:
        if not is_whole(item):
            raise UserError(f"workers holds {item!r}; each must be a whole number of at least 1")
    return items


def steps_that_fit(nbytes: int, steps: int) -> tuple[int, list[str]]:
    """How many steps are compared of a model with so many bytes of trained parameters, and a note
    when they are fewer than was asked for."""
    each = 2 * nbytes
    if not each:
        raise UserError("the model has no parameter that is trained; there is nothing to verify")
    fit = MEMORY // each
    if fit < 1:
        raise UserError(
            f"one step's gradients and weights are {each / 2**30:.1f} GiB, and verify keeps at "
            f"most {MEMORY / 2**30:g} GiB of "
            "them; verify the same model with fewer layers or a smaller width"
        )
    if fit >= steps:
        return steps, []
    return fit, [
        f"{fit} steps were compared and not {steps}: each step's gradients and weights are "
        f"{each / 2**20:.0f} MiB, and at most {MEMORY / 2**30:g} GiB of them are kept"
    ]
