"""The page that a training leaves in its logdir."""

from __future__ import annotations

import math
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
from allhands.report.curves import Curve, draw_metric
from allhands.report.environment import environment
from allhands.report.figures import has_matplotlib
from allhands.report.membership_plot import draw_members
from allhands.report.page import (
    NAME,
    folded,
    grid,
    pairs,
    picture,
    pictures,
    section,
    shares,
    wide,
    write_page,
)
from allhands.report.table_layout import value_text

if TYPE_CHECKING:
    from allhands.loop.base_loop import BaseLoop
    from allhands.loop.lifecycle import Lifecycle

_MOST = 12  # metrics that are drawn
_ROWS = 50  # of the history


def write_run_report(loop: BaseLoop, loggers: Loggers) -> None:
    """Write ``report.html`` into the logdir: curves, history, settings, environment, where the time
    went, memory, members. On ranks other than 0, or without a logdir, nothing."""
    logdir = loop.settings.logdir
    if logdir is None or loop.world.rank or not loggers.rows or not wanted():
        return
    label, at, curves = loggers.measured()
    parts = [
        section("Curves", curves_of(label, at, curves)),
        section("History", history_of(loggers)),
        section("Settings", pairs(_settings(loop))),
        *run_file_of(logdir),
        *about_the_run(loop, loop.times.parts(), _memory(loop)),
    ]
    rows = len(loggers.rows)
    about = f"{loop.global_step:,} optimizer steps, {rows} row{'s' if rows > 1 else ''} of history"
    about += f"; stopped early: {loop.stop_reason}" if loop.stop_reason else ""
    write_page(logdir / NAME, f"Training in {logdir.name}", about, parts)


def curves_of(label: str, at: list[float], curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """A picture for each metric."""
    if not curves:
        return "<p>Nothing was measured.</p>"
    if not has_matplotlib():
        return "<p>Curves need matplotlib: pip install 'allhands[report]'.</p>"
    drawn = []
    for name, of_loaders in list(curves.items())[:_MOST]:

        def draw(figure: Any, name: str, of_loaders: Mapping[str, Curve]) -> None:
            draw_metric(figure.subplots(), name, (label, at), of_loaders)

        one = partial(draw, name=name, of_loaders=of_loaders)
        drawn.append(picture(one, (4.6, 3.2), f"{name} by {label}"))
    left_out = list(curves)[_MOST:]
    more = f"<p>Not drawn: {', '.join(left_out)}; see metrics.csv.</p>" if left_out else ""
    return pictures(drawn) + more


def history_of(loggers: Loggers) -> str:
    """The last rows of the history."""
    rows = loggers.rows[-_ROWS:]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = ([_cell(key, row.get(key, "")) for key in columns] for row in rows)
    more = len(loggers.rows) - len(rows)
    before = f"<p>The last {len(rows)} rows; {more} more are in metrics.csv.</p>" if more else ""
    return before + grid([key.replace("_", " ", 1) for key in columns], cells, left=0)


def _cell(name: str, text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    if name in ("epoch", "step", "seconds") or math.isnan(value):
        return text
    return f"{value:.3g}" if name == "lr" else value_text(value)


def about_the_run(loop: Lifecycle, times: Mapping[str, float], memory: str) -> list[str]:
    """The sections that all trainings have: time, memory, members, environment."""
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
    """The run file that lies in a logdir, folded."""
    path = logdir / "run.yml"
    return [folded("The run file", path.read_text(encoding="utf-8"))] if path.exists() else []
