"""A run as one HTML file: curves, clients, and who trained whom in the last round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.federated.by_client import BY_CLIENT, MOST_BY_NAME
from allhands.report import has_matplotlib
from allhands.report.curves import metric_picture
from allhands.report.figures import TEXT, plain
from allhands.report.history import History
from allhands.report.page import grid, pairs, picture, pictures, section, wide, write_page

_BARS = 400  # clients that have a bar each


def report(
    history: Mapping[str, Any],
    path: str | Path,
    *,
    last: Mapping[str, Sequence[float]] | None = None,
    sizes: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    more: Sequence[str] = (),
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
        names: of every client; None: their numbers.
        more: further sections, of `allhands.report.page.section`.

    Raises:
        UserError: the history has no round.
    """
    if not history.get("round"):
        raise UserError("a report of no round: train at least one before report(history, path)")
    parts = [section("Curves", _curves(history))]
    if has_matplotlib():
        if sizes is not None or last is not None:
            parts.append(section("Clients", _clients(sizes, last, names)))
        if last is not None:
            title = f"Devices in round {history['round'][-1] + 1}"
            parts.append(section(title, _schedule(last, names)))
    else:
        parts.append("<p>Other pictures need matplotlib: pip install 'allhands[report]'.</p>")
    if BY_CLIENT in history:
        parts.append(section("Each client", _each(history, sizes)))
    parts.append(section("In sum", pairs(_summary(history))))
    if settings:
        parts.append(section("Settings", pairs(settings)))
    rounds = len(history["round"])
    about = f"{rounds} round{'s' if rounds > 1 else ''}"
    write_page(path, "Federated training", about, [*parts, *more])


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
    axes, values = _axes(history), History(history).measured()
    kinds = (
        "loss",
        *dict.fromkeys(name.split(" ", 1)[1] for name in values if not name.endswith(" loss")),
    )

    drawn = []
    for kind in kinds:
        of_kind = {name: one for name, one in values.items() if name.split(" ", 1)[1] == kind}
        loaders = {name.split(" ", 1)[0]: one for name, one in of_kind.items()}
        for label, at in axes.items():
            drawn.append(metric_picture(kind, (label, at), loaders, whole=label == "round"))
    return pictures(drawn)


def _clients(
    sizes: Sequence[int] | None,
    last: Mapping[str, Sequence[float]] | None,
    names: Sequence[str] | None,
) -> str:
    """Samples and seconds of clients: a bar each of few that have names, and histograms of
    others."""
    few = names is not None and len(names) <= MOST_BY_NAME
    shown: list[tuple[str, Sequence[float], Sequence[str]]] = []
    if sizes is not None:
        shown.append(("samples of a client", sizes, names if few and names else ()))
    if last is not None:
        trained = [names[int(client)] for client in last["client"]] if few and names else ()
        shown.append(("seconds of a client, last round", last["seconds"], trained))

    drawn = []
    for label, values, called in shown:

        def draw(figure: Any, label: str, values: Sequence[float], called: Sequence[str]) -> None:
            plot = figure.subplots()
            if called:
                plot.barh(list(called), list(values), color="#2e6f95")
                plot.invert_yaxis()
            else:
                plot.hist(list(values), bins=min(40, max(5, len(values) // 2)), color="#2e6f95")
            plot.set_xlabel(label)
            plot.set_title("clients", loc="left", fontweight="bold", color=TEXT)
            plain(plot, whole=False)
            if called:
                plot.grid(visible=False)

        one = partial(draw, label=label, values=values, called=called)
        height = max(2.8, 1.2 + 0.25 * len(called))
        what = f"{label}: {'each of them' if called else 'how many clients'}"
        drawn.append(picture(one, (4.6, height), what))
    return pictures(drawn)


def _each(history: Mapping[str, Any], sizes: Sequence[int] | None) -> str:
    found: Mapping[str, Any] = history[BY_CLIENT]
    measured = list(dict.fromkeys(key for own in found.values() for key in own.get("measured", ())))
    kinds = [kind for kind in measured if kind != "round"]
    columns = {name: f"clients {name}" for name in ("skipped", "failed", "absent", "late")}
    columns = {name: what for name, what in columns.items() if history.get(name)}
    header = ["client", "samples", "rounds", "loss", *(f"own {kind}" for kind in kinds), *columns]
    rows = []
    for number, (name, own) in enumerate(found.items()):
        values = own.get("measured", {})
        rows.append(
            [
                name,
                "" if sizes is None else f"{sizes[number]:,}",
                str(len(own.get("round", ()))),
                *(_last(column) for column in [own.get("loss"), *map(values.get, kinds)]),
                *(str(sum(name in clients for clients in history[key])) for key in columns),
            ]
        )
    return grid(header, rows) + _curves_of_each(history, kinds)


def _last(column: Sequence[float] | None) -> str:
    return f"{column[-1]:.4g}" if column else ""


def _curves_of_each(history: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """What clients have learnt, and what each measured on samples of its own, over rounds."""
    found: Mapping[str, Any] = history[BY_CLIENT]
    place = {round_: number for number, round_ in enumerate(history["round"])}
    at = [round_ + 1 for round_ in history["round"]]
    wanted = {"loss of training": (found, "loss")}
    measured = {name: own.get("measured", {}) for name, own in found.items()}
    wanted |= {f"own {kind}": (measured, kind) for kind in kinds}
    drawn = []
    for title, (lists, key) in wanted.items():
        curves = {
            name: ([place[round_] for round_ in own["round"]], list(own[key]))
            for name, own in lists.items()
            if own.get(key)
        }
        if curves:
            drawn.append(metric_picture(title, ("round", at), curves))
    return pictures(drawn)


def _schedule(last: Mapping[str, Sequence[float]], names: Sequence[str] | None) -> str:
    ranks = sorted({int(rank) for rank in last["rank"]})

    def draw(figure: Any) -> None:
        plot = figure.subplots()
        ends = dict.fromkeys(ranks, 0.0)
        trained = list(zip(last["client"], last["rank"], last["seconds"], strict=True))
        if len(trained) > _BARS:  # one bar a rank
            of_rank = {rank: [s for _, r, s in trained if r == rank] for rank in ranks}
            trained = [(0, rank, sum(seconds)) for rank, seconds in of_rank.items()]
        for client, rank, seconds in trained:
            plot.barh(
                int(rank),
                seconds,
                left=ends[int(rank)],
                edgecolor="#d8dade",
                linewidth=0.5,
                color=f"C{int(rank) % 10}",
            )
            if len(last["client"]) <= 60:
                plot.text(
                    ends[int(rank)] + seconds / 2,
                    int(rank),
                    str(int(client)) if names is None else names[int(client)],
                    ha="center",
                    va="center",
                    fontsize=7,
                )
            ends[int(rank)] += seconds
        plot.set(
            xlabel="seconds of training, client by client in the order of the cohort", ylabel="rank"
        )
        plot.set_yticks(ranks)
        plain(plot, whole=False)

    size = (9, 1.2 + 0.4 * len(ranks))
    return wide(picture(draw, size, "which rank trained which client, for how long"))


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
    for name, (_, column) in History(history).measured().items():
        known = [value for value in column if not math.isnan(value)]
        found[f"{name}, last (least to most)"] = (
            f"{column[-1]:.4g} ({min(known):.4g} to {max(known):.4g})" if known else "nan"
        )
    return found
