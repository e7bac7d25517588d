"""The page that a training leaves in its logdir."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.loop import membership_log
from allhands.loop.announce import data_in_words
from allhands.loop.loggers import Loggers, wanted
from allhands.loop.peak import in_words
from allhands.loop.schedule import learning_rates
from allhands.report.curves import curve_pictures
from allhands.report.environment import environment
from allhands.report.figures import has_matplotlib
from allhands.report.history_table import html_table
from allhands.report.membership_plot import draw_members
from allhands.report.page import (
    NAME,
    folded,
    grid,
    pairs,
    picture,
    section,
    shares,
    wide,
    write_page,
)

if TYPE_CHECKING:
    from allhands.loop.base_loop import BaseLoop
    from allhands.loop.lifecycle import Lifecycle

_ROWS = 50  # of the history


def write_run_report(loop: BaseLoop, loggers: Loggers) -> None:
    """Write ``report.html`` into the logdir: curves, history, settings, environment, where the time
    went, memory, members. On ranks other than 0, or without a logdir, nothing."""
    logdir = loop.settings.logdir
    if logdir is None or loop.world.rank or not loggers.rows or not wanted():
        return
    label, at, curves = loggers.measured()
    parts = [
        section("Curves", curve_pictures(label, at, curves)),
        section("History", history_of(loggers)),
        section("Settings", pairs(_settings(loop))),
        *run_file_of(logdir),
        *about_the_run(loop, loop.times.parts(), _memory(loop)),
    ]
    rows = len(loggers.rows)
    about = f"{loop.global_step:,} optimizer steps, {rows} row{'s' if rows > 1 else ''} of history"
    about += f"; stopped early: {loop.stop_reason}" if loop.stop_reason else ""
    write_page(logdir / NAME, f"Training in {logdir.name}", about, parts)


def history_of(loggers: Loggers) -> str:
    """The last rows of the history."""
    columns = dict.fromkeys(key for row in loggers.rows for key in row)
    return html_table(
        {
            key.replace("_", " ", 1): [
                float(row[key]) if row.get(key) else None for row in loggers.rows
            ]
            for key in columns
        },
        _ROWS,
        "; all are in metrics.csv",
    )


def about_the_run(loop: Lifecycle, times: Mapping[str, float], memory: str) -> list[str]:
    parts = [section("Where the time went", shares(times) + "<p>On the host of rank 0.</p>")]
    parts.append(section("Memory", f"<p>{memory}</p>" if memory else "<p>Not measured.</p>"))
    world = loop.world
    members = pairs({"workers": world.world_size, "started by": world.environment})
    logdir = loop.settings.logdir
    path = Path(logdir or "") / membership_log.CSV
    rows = membership_log.read_rows(path) if logdir is not None else []
    if rows:
        changes = membership_log.changes_in(path)
        if has_matplotlib():
            draw = partial(draw_members, changes=changes, until=time.time())
            members += wide(picture(draw, (8, 3.2), "workers over time"))
        members += grid(list(rows[0]), [list(row.values()) for row in rows], left=len(rows[0]))
    else:
        members += "<p>No worker was lost, and none joined.</p>"
    parts.append(section("Membership", members))
    return [*parts, section("Environment", pairs(environment()))]


def _memory(loop: BaseLoop) -> str:
    return in_words(loop.peak_memory, loop.world) if loop.peak_memory else ""


def _settings(loop: BaseLoop) -> dict[str, Any]:
    settings, world = loop.settings, loop.world
    layout = loop.placement.layout
    found: dict[str, Any] = {
        "strategy": loop.strategy.in_words() + (f" ({layout})" if layout else ""),
        "workers": f"{world.world_size} on {world.device.type}"
        + (f", {world.backend}" if world.world_size > 1 else ""),
        "data": data_in_words(loop) if loop.trained else "batches of the loop's own",
        "model": f"{type(settings.model).__name__}, "
        f"{sum(p.numel() for p in settings.model.parameters()):,} parameters",
    }
    criterion = getattr(settings, "criterion", None)
    if criterion is not None:
        found["criterion"] = getattr(criterion, "__name__", type(criterion).__name__)
    for name, group in loop.groups.items():
        of = f" of {name}" if len(loop.groups) > 1 else ""
        rate = learning_rates(group.optimizer)[0]
        optimizer = f"{type(group.optimizer).__name__}, learning rate {rate:.4g} at the end"
        found[f"optimizer{of}"] = optimizer
        if group.schedule.scheduler is not None:
            found[f"schedule{of}"] = group.schedule.describe()
    for name in ("num_epochs", "max_steps", "accumulate", "clip_norm", "precision", "step", "seed"):
        value = getattr(settings, name, None)
        if value is not None:
            found[name] = value
    return found


def run_file_of(logdir: Path) -> list[str]:
    path = logdir / "run.yml"
    return [folded("The run file", path.read_text(encoding="utf-8"))] if path.exists() else []
