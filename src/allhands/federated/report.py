"""A run as one HTML file: curves, clients, and who trained whom in the last round."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.report import new_figure

_STYLE = (
    "body{font:15px sans-serif;max-width:1000px;margin:2em "
    "auto}img{max-width:100%}td{padding:2px 12px 2px 0}"
)


def report(
    history: Mapping[str, Any],
    path: str | Path,
    *,
    last: Mapping[str, Sequence[float]] | None = None,
    sizes: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write what a federated training came to into one HTML file that needs no other file and no
    network.

    Args:
        history: what the training returned. Drawn are loss and each measured value over rounds,
            over bytes (up and down, in sum) and, where devices are in virtual time, over that.
        path: of the file.
        last: of the last round, by client of its cohort: ``client``, ``rank``, ``seconds``;
            `Rounds.last`.
        sizes: samples of every client, shape ``[clients]``.
        settings: what is put into the table of settings.

    Raises:
        UserError: matplotlib is not installed, or the history has no round.
    """
    if not history.get("round"):
        raise UserError("a report of no round: train at least one before report(history, path)")
    parts = [_curves(history)]
    if sizes is not None or last is not None:
        parts.append(_clients(sizes, last))
    if last is not None:
        parts.append(_schedule(last, history["round"][-1]))
    parts.append("<h2>In sum</h2>" + _table(_summary(history)))
    if settings:
        parts.append("<h2>Settings</h2>" + _table(settings))
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Federated '
        f"training</title><style>{_STYLE}</style>"
        f"<h1>Federated training, {len(history['round'])} rounds</h1>{''.join(parts)}</html>\n"
    )
    Path(path).write_text(text, encoding="utf-8")


def series(history: Mapping[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    """Every measured value: its name, such as ``"valid accuracy"``, its places in the rounds, and
    its values there."""
    place = {round_: i for i, round_ in enumerate(history["round"])}
    found = {}
    for loader, values in history.items():
        if not isinstance(values, Mapping):
            continue
        places = [place[round_] for round_ in values.get("round", history["round"])]
        for name, column in values.items():
            if name != "round" and len(column) == len(places):
                found[f"{loader} {name}"] = places, list(column)
    return found


def _axes(history: Mapping[str, Any]) -> dict[str, list[float]]:
    """What values are drawn over: by label, one number a round."""
    axes: dict[str, list[float]] = {"round": [round_ + 1 for round_ in history["round"]]}
    if "bytes_up" in history:
        moved = (
            up + down for up, down in zip(history["bytes_up"], history["bytes_down"], strict=True)
        )
        axes["megabytes up and down"] = [moved_ / 1e6 for moved_ in accumulate(moved)]
    if history.get("virtual_time"):
        axes["virtual seconds"] = list(history["virtual_time"])
    return axes


def _curves(history: Mapping[str, Any]) -> str:
    axes, values = _axes(history), series(history)
    kinds = (
        "loss",
        *dict.fromkeys(name.split(" ", 1)[1] for name in values if not name.endswith(" loss")),
    )

    def draw(figure: Any) -> None:
        plots = figure.subplots(len(kinds), len(axes), squeeze=False)
        for row, kind in zip(plots, kinds, strict=True):
            for plot, (label, at) in zip(row, axes.items(), strict=True):
                for name, (places, column) in values.items():
                    if name.split(" ", 1)[1] == kind:
                        plot.plot(
                            [at[place] for place in places],
                            column,
                            marker="." if len(column) < 40 else "",
                            label=name,
                        )
                plot.set(xlabel=label, ylabel=kind)
                plot.legend(fontsize=8)

    return "<h2>Curves</h2>" + _draw(
        draw, (4.5 * len(axes), 3 * len(kinds)), "values over rounds, bytes and virtual time"
    )


def _clients(sizes: Sequence[int] | None, last: Mapping[str, Sequence[float]] | None) -> str:
    shown = [("samples of a client", sizes)] if sizes is not None else []
    if last is not None:
        shown.append(("seconds of a client, last round", last["seconds"]))  # type: ignore[arg-type]

    def draw(figure: Any) -> None:
        for plot, (label, values) in zip(
            figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
        ):
            plot.hist(list(values), bins=min(40, max(5, len(values) // 2)))
            plot.set(xlabel=label, ylabel="clients")

    return "<h2>Clients</h2>" + _draw(
        draw, (5.0 * len(shown), 3), "how samples and times are spread over clients"
    )


def _schedule(last: Mapping[str, Sequence[float]], round_: int) -> str:
    ranks = sorted({int(rank) for rank in last["rank"]})

    def draw(figure: Any) -> None:
        plot = figure.subplots()
        ends = dict.fromkeys(ranks, 0.0)
        for client, rank, seconds in zip(
            last["client"], last["rank"], last["seconds"], strict=True
        ):
            plot.barh(
                int(rank),
                seconds,
                left=ends[int(rank)],
                edgecolor="white",
                linewidth=0.5,
                color=f"C{int(rank) % 10}",
            )
            if len(last["client"]) <= 60:
                plot.text(
                    ends[int(rank)] + seconds / 2,
                    int(rank),
                    str(int(client)),
                    ha="center",
                    va="center",
                    fontsize=7,
                )
            ends[int(rank)] += seconds
        plot.set(
            xlabel="seconds of training, client by client in the order of the cohort", ylabel="rank"
        )
        plot.set_yticks(ranks)

    picture = _draw(
        draw, (10, 1.2 + 0.4 * len(ranks)), "which rank trained which client, for how long"
    )
    return f"<h2>Devices in round {round_ + 1}</h2>" + picture


def _summary(history: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": f"{sum(history.get('seconds', [])):.2f}"}
    for name in ("bytes_up", "bytes_down"):
        if name in history:
            found[name] = f"{sum(history[name]):,.0f}"
    for name in ("skipped", "failed", "retried"):
        found[f"clients {name}"] = sum(len(clients) for clients in history.get(name, []))
    found["rounds without an update"] = sum(map(bool, history.get("unchanged", [])))
    if history.get("epsilon"):
        found["epsilon"] = f"{history['epsilon'][-1]:.4g}"
    for name, (_, column) in series(history).items():
        known = [value for value in column if not math.isnan(value)]
        found[f"{name}, last (least to most)"] = (
            f"{column[-1]:.4g} ({min(known):.4g} to {max(known):.4g})" if known else "nan"
        )
    return found


def _table(rows: Mapping[str, Any]) -> str:
    cells = (
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _draw(draw: Callable[[Any], None], size: tuple[float, float], what: str) -> str:
    figure, room = new_figure(*size, what="a report"), io.BytesIO()
    draw(figure)
    figure.savefig(room, format="svg", metadata={"Date": None})
    # As an image of its own, whose names do not mix with those of the other pictures.
    return (
        f'<img alt="{what}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(room.getvalue()).decode()}">'
    )
