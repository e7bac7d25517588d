"""A plan as text."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Sequence

from allhands.planning.forecast import Prediction

_KINDS = ("weights", "gradients", "optimizer", "activations")
_COLUMNS = (
    "GB",
    "weights",
    "grads",
    "optim",
    "activ",
    "other",
    "MB sent",
    "ms",
    "busy",
    "samples/s",
)
_LEAST_WIDTH = 100
# A card that is fuller than this may lack room, since the allocator's memory has holes.
_FULL = 0.9


def text_of(
    rows: Sequence[Prediction],
    title: str,
    assumptions: str,
    best: Prediction | None,
    run_file: str,
    width: int | None = None,
) -> str:
    """A table, why what does not fit does not, and a run file's lines for the best.

    Args:
        rows: in the order in which they are shown.
        title: how many GPUs of which kind.
        assumptions: what the times stand on.
        best: the row that is proposed; None where none fits.
        run_file: its lines.
        width: in characters; None takes the terminal's, at least 100.
    """
    wide = width or max(_LEAST_WIDTH, shutil.get_terminal_size((_LEAST_WIDTH, 24)).columns)
    lines = [_table(rows, title, wide)]
    reasons = [f"{row.name}: {row.why_not}" for row in rows if row.why_not]
    if reasons:
        lines += ["not possible:", *(f"  {reason}" for reason in reasons), ""]
    notes = [f"{row.name}: {note}" for row in rows if (note := _note(row))]
    lines += [_wrapped(note, wide) for note in [*notes, assumptions]]
    if best is None:
        lines.append(f"nothing fits; {_advice(rows)}")
    else:
        passed = [row.name for row in rows[: rows.index(best)] if row.fits]
        more = f", which trains as one process does (unlike {', '.join(passed)})" if passed else ""
        said = f"the fastest that fits: {best.name}{more}. In a run file:"
        lines += ["", _wrapped(said, wide), ""]
        lines += [f"    {line}" for line in run_file.splitlines()]
    return "\n".join(lines)


def _table(rows: Sequence[Prediction], title: str, width: int) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{title}, {rows[0].limit / 1e9:g} GB each; GB of the fullest, MB a rank sends in a "
        "step",
        box=None,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("strategy")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.seconds is not None:
            table.add_row(*_cells(row))
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _cells(row: Prediction) -> list[str]:
    assert row.seconds is not None
    kinds = [row.memory.get(kind, 0) / 1e9 for kind in _KINDS]
    other = row.peak / 1e9 - sum(kinds)
    sizes = [f"{size:.2f}" for size in (row.peak / 1e9, *kinds, other)]
    return [
        row.name + ("" if row.fits else ", too large"),
        *sizes,
        f"{row.sent / 1e6:,.0f}",
        f"{1e3 * row.seconds.total:,.1f}",
        f"{100 * row.efficiency:.0f} %",
        f"{row.samples_per_second:,.0f}",
    ]


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _note(row: Prediction) -> str:
    """What is to be known of a row beside its numbers."""
    if row.refused:
        return ""
    servers = "" if row.servers is None else str(row.servers)
    notes = [
        row.note,
        servers,
        f"fills {100 * row.peak / row.limit:.0f} % of a GPU, and the allocator's holes come on top"
        if row.fits and row.peak > _FULL * row.limit
        else "",
        "" if row.exact else "the result is not that of one process",
    ]
    return "; ".join(filter(None, notes))


def _advice(rows: Sequence[Prediction]) -> str:
    """What would make the smallest fit."""
    possible = [row for row in rows if not row.refused]
    least = min(possible, key=lambda row: row.peak)
    largest = max(least.memory, key=lambda kind: least.memory[kind])
    words = {
        "activations": "a smaller batch with accumulate=…",
        "temporary": "a smaller batch with accumulate=…",
    }.get(largest, "more GPUs")
    return (
        f"{least.name} comes closest with {least.peak / 1e9:.1f} GB, of which {largest} "
        f"{least.memory[largest] / 1e9:.1f} GB: take {words}"
    )
