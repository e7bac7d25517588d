"""The page of a run across sites that goes on: rounds, sites, what was measured, who is silent."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites.display import StatusTable, said_at
from allhands.federated.sites.event_log import EventReader
from allhands.report.curves import Curve, metric_picture
from allhands.report.page import as_written, document, grid, paragraph, pictures, section
from allhands.wire.page_server import Answer, PageServer

_LINES, _ROUNDS = 20, 10
_DRAWN_EVERY = 5.0  # seconds between two drawings of the curves
_ICON = '<link rel="icon" href="data:,">'
_SCRIPT = """
const main = document.querySelector("main"), note = document.querySelector("#note");
let failed = 0;
async function look() {
  try {
    const reply = await fetch(location.pathname.replace(/\\/?$/, "/now"), {cache: "no-store"});
    if (!reply.ok) throw new Error(reply.status);
    const text = await reply.text();
    const moved = [...main.querySelectorAll(".wide, pre")].map((part) => part.scrollLeft);
    main.innerHTML = text;
    main.querySelectorAll(".wide, pre").forEach((part, n) => { part.scrollLeft = moved[n] || 0; });
    failed = 0;
  } catch { failed += 1; }
  note.textContent = failed > 1 ? "The server does not answer any more: the run has ended, or the "
    + "way to it is cut. Above is what it said last." : "";
  setTimeout(look, 1000);
}
setTimeout(look, 1000);
"""


class RunPage:
    """A run as a page that renews itself.

    Args:
        events: the run's file of events, which need not be there yet.
        since: seconds since 1970; events before it are those of an earlier run.
    """

    def __init__(self, events: Path, since: float) -> None:
        self._reader, self._since = EventReader(events), since
        self._status = StatusTable()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._lock = threading.Lock()
        self._curves, self._drawn, self._drawn_at = "", 0, -_DRAWN_EVERY

    def answer(self, path: str) -> Answer | None:
        """The page ("") or the part of it that changes ("now")."""
        if path not in ("", "now"):
            return None
        with self._lock:
            body = self._body(time.time())
        if path == "now":
            return Answer(body.encode())
        nonce = secrets.token_urlsafe(12)
        script = f'<script nonce="{nonce}">{_SCRIPT}</script>'
        parts = [f"<main>{body}</main>", '<p id="note" role="status"></p>', script]
        text = document("Federated training", "This page renews itself.", parts, _ICON)
        return Answer(text.encode(), nonce=nonce)

    def _body(self, now: float) -> str:
        for event in self._reader.news():
            if event["time"] >= self._since:
                line = self._status.take(event)
                if line is not None:
                    self._lines.append(said_at(line, event["time"]))
        status = self._status
        state = status.title() if status.reason is None else f"ended: {status.reason}"
        trains, silent = status.waited_for(now)
        parts = [
            paragraph(state[:1].upper() + state[1:] + "."),
            section("Sites", grid(*status.cells(now), left=2)) if status.rows else "",
            paragraph(f"Silent: {', '.join(silent)}.") if silent else "",
            paragraph(f"In training: {', '.join(trains)}.") if trains else "",
        ]
        if status.finished:
            parts.append(section("Rounds", self._rounds()))
        said = "\n".join(reversed(self._lines)) or "nothing yet"
        parts.append(section("What happened", as_written(said)))
        return "".join(parts)

    def _rounds(self) -> str:
        finished = self._status.finished
        names = list(dict.fromkeys(name for one in finished for name in _values(one)))
        rows = [
            [
                str(one["round"] + 1),
                str(len(one["brought"])),
                f"{one['seconds']:.1f}",
                *(_number(_values(one).get(name)) for name in names),
            ]
            for one in finished[-_ROUNDS:][::-1]
        ]
        table = grid(["round", "sites", "seconds", *names], rows)
        late = time.monotonic() - self._drawn_at > _DRAWN_EVERY
        if len(finished) != self._drawn and late:
            self._curves, self._drawn = _draw(finished), len(finished)
            self._drawn_at = time.monotonic()
        return self._curves + table


def serve_page(events: Path, since: float, port: int) -> PageServer:
    """Start the page of a run."""
    try:
        server = PageServer(port, RunPage(events, since).answer)
    except OSError as error:
        raise UserError(
            f"--page {port} cannot be listened on: {error.strerror}; name another port"
        ) from None
    server.start()
    return server


def _values(round_end: Mapping[str, Any]) -> dict[str, float]:
    measured = {"train": {"loss": round_end.get("loss")}, **(round_end.get("values") or {})}
    return {
        f"{loader} {name}": value
        for loader, values in measured.items()
        for name, value in values.items()
        if value is not None
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _draw(finished: Sequence[Mapping[str, Any]]) -> str:
    places = [one["round"] + 1 for one in finished]
    kinds: dict[str, dict[str, Curve]] = {}
    for row, one in enumerate(finished):
        for full, value in _values(one).items():
            loader, _, kind = full.partition(" ")
            rows, values = kinds.setdefault(kind, {}).setdefault(loader, ([], []))
            rows.append(row)
            values.append(value)

    over = "round", places
    return pictures(metric_picture(kind, over, loaders) for kind, loaders in kinds.items())
