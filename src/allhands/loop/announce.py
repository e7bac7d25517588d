"""What is printed of a training: what runs, and a row for each epoch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from allhands.loop.joining import ends_with_a_worker
from allhands.report.table_layout import value_text
from allhands.world import slurm

if TYPE_CHECKING:
    from allhands.loop.grouped import GroupedLoop
    from allhands.loop.reporter import Reporter


def announce(loop: GroupedLoop, schedule_note: str) -> None:
    """Say who trains, on how much, in what steps, with which seed; `schedule_note` goes behind the
    schedule, if not empty."""
    world, settings = loop.world, loop.settings
    where = f"{world.world_size} worker{'s' if world.world_size > 1 else ''} on {world.device.type}"
    if world.world_size > 1:
        where += f", {world.backend}"
    strategy, layout = loop.strategy.in_words(), loop.placement.layout
    data = data_in_words(loop) if loop.trained else "batches of your own"
    loop.reporter.line(
        f"allhands: {strategy}{f' ({layout})' if layout else ''}, {where}; {data}; "
        f"seed {settings.seed}"
    )
    for group in loop.groups.values():
        for note in group.exchange.notes:
            loop.reporter.line(note)
        if group.schedule.scheduler is not None:
            loop.reporter.line(group.schedule.describe())
    if loop.elastic is not None and (why := loop.elastic.refused()):
        loop.reporter.line(ends_with_a_worker(why))
    if schedule_note:
        loop.reporter.line(schedule_note)
    if settings.logdir is None and slurm.wants_requeue(os.environ):
        loop.reporter.line(
            f"note: {slurm.REQUEUE_VARIABLE}=1 has no effect here: without a logdir nothing is "
            "saved"
        )


def data_in_words(loop: GroupedLoop) -> str:
    feed, settings = loop.trained[0], loop.settings
    in_shares = bool(loop.placement.layout)
    samples = (
        f"{feed.num_samples:,} samples" if feed.num_samples is not None else "a stream of samples"
    )
    number = feed.num_steps if loop.passes is None else settings.steps_per_epoch
    steps = f", {number} steps an epoch" if number is not None else ""
    if settings.max_steps is not None:
        steps += f", at most {settings.max_steps:,} steps"
    if not feed.global_batch:
        return f"batches made by the batch sampler; {samples}{steps}, {feed.kind}"
    parts = (
        f"{feed.batch_size} a {'share' if in_shares else 'worker'} x "
        f"{loop.strategy.shares(loop.world.world_size)}"
    )
    parts += f" x {settings.accumulate} accumulated" if settings.accumulate > 1 else ""
    return f"global batch {feed.global_batch} ({parts}); {samples}{steps}, {feed.kind}"


def report_epoch(
    reporter: Reporter,
    what: str,
    place: str,
    values: dict[str, dict[str, float]],
    rate: float,
    seconds: float,
    improved: bool,
    samples: int = 0,
    left: float | None = None,
) -> None:
    """The row of the epoch (or whatever `what` calls it) that has just ended.

    Args:
        reporter: prints it.
        what: what a row is of.
        place: its number among all.
        values: by loader and metric.
        rate: the learning rate.
        seconds: that it took.
        improved: it is the best so far.
        samples: that were trained on in it, by all ranks; 0: not known.
        left: seconds until the end of the training; None: not known.
    """
    named = {
        f"{loader} {name}": value
        for loader, metrics in values.items()
        for name, value in metrics.items()
    }
    row: dict[str, tuple[str, Any]] = {what: (place, int(place.partition("/")[0]))}
    row |= {name: (value_text(value), value) for name, value in named.items()}
    row["lr"] = f"{rate:.3g}", rate
    row["seconds"] = f"{seconds:.2f}", seconds
    if samples and seconds:
        row["samples/s"] = f"{samples / seconds:,.0f}", samples / seconds
    if left is not None:
        row["left"] = duration(left), left
    row["best"] = ("*" if improved else ""), improved
    cells, raw = zip(*row.values(), strict=True)
    reporter.row(list(row), cells, raw)


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
