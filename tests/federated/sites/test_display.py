"""The operator's table and lines, from events."""

from __future__ import annotations

import io

from rich.console import Console

from allhands.federated.sites.display import Display, StatusTable

BEGIN = {
    "kind": "begin",
    "sites": ["a", "b"],
    "needed": 2,
    "per_round": 2,
    "rounds": 3,
    "round": 0,
    "algorithm": "fedavg",
}
EVENTS = [
    BEGIN,
    {"kind": "waiting", "connected": ["a"], "missing": ["b"], "needed": 2, "seconds": 10.2},
    {"kind": "greeted", "site": "a", "samples": 40, "tests": 4},
    {"kind": "refused", "site": "b", "reason": "another model"},
    {"kind": "greeted", "site": "b", "samples": 60, "tests": 6},
    {"kind": "stranger", "node": 7, "reason": "no key of the list"},
    {"kind": "round", "round": 0, "cohort": ["a"], "absent": ["b"]},
    {
        "kind": "update",
        "site": "a",
        "round": 0,
        "samples": 40,
        "steps": 4,
        "loss": 0.25,
        "norm": 1.0,
        "seconds": 2.0,
        "waited": 3.0,
        "bytes": 2_000_000,
    },
    {"kind": "bad", "site": "b", "round": 0, "reason": "NaN"},
    {"kind": "failed", "site": "b", "round": 0, "reason": "ValueError: no"},
    {"kind": "late", "site": "b", "round": 0, "seconds": 5.0},
    {"kind": "dropped", "site": "b", "round": 0, "reason": "of round 0"},
    {"kind": "left", "site": "b", "reason": "its SuperNode is offline"},
    {"kind": "evaluated", "site": "a", "round": 1, "count": 4, "loss": 0.3, "accuracy": 0.75},
    {
        "kind": "round_end",
        "round": 0,
        "brought": ["a"],
        "seconds": 4.0,
        "loss": 0.25,
        "values": {"clients": {"loss": 0.3, "accuracy": 0.75}},
        "unchanged": False,
        "dropped": 1,
    },
    {"kind": "end", "rounds": 1, "reason": "stopped"},
]


def test_every_event_is_counted_and_said():
    board = StatusTable()
    said = [board.take({"time": 0.0, **event}) for event in EVENTS]
    assert said == [
        "2 sites, 3 rounds of fedavg; a round needs 2",
        "waiting for b (10 s)",
        "a takes part: 40 samples",
        "b is refused: another model",
        "b takes part: 60 samples",
        "a node that is no site of this run: no key of the list",
        "round 1: without b, not connected",
        None,
        "round 1: b: its update is refused: NaN",
        "round 1: b failed: ValueError: no",
        "round 1: b has sent nothing within 5 s and is left out",
        "round 1: a reply of b that nobody waits for any more: of round 0",
        "b has left: its SuperNode is offline",
        None,
        "round 1: 1 sites in 4.0 s, loss 0.25, clients: loss 0.3 accuracy 0.75",
        "the run has ended: stopped",
    ]
    a, b = board.rows["a"], board.rows["b"]
    assert (a.state, a.rounds, a.loss, a.accuracy, a.bytes) == ("ready", 1, 0.25, 0.75, 2_000_000)
    assert (b.state, b.rounds, b.refused, b.failed, b.late) == ("gone", 0, 1, 1, 1)
    assert board.reason == "stopped"


def test_who_trains_and_who_is_silent_and_for_how_long():
    board = StatusTable()
    board.take({**BEGIN, "time": 100.0})
    board.take({"time": 101.0, "kind": "greeted", "site": "a", "samples": 4, "tests": 0})
    board.take({"time": 110.0, "kind": "round", "round": 0, "cohort": ["a"], "absent": ["b"]})
    assert board.waited_for(115.0) == (["a (5 s)"], ["b (not connected, 15 s)"])
    header, rows = board.cells(115.0)
    assert [row[:3] for row in rows] == [["a", "training", "14 s"], ["b", "missing", ""]]
    assert header[:3] == ["site", "state", "heard before"]
    assert len(header) == len(rows[0])
    board.take({"time": 120.0, "kind": "late", "site": "a", "round": 0, "seconds": 10.0})
    assert board.waited_for(121.0)[1][0] == "a (nothing came in time, 11 s)"
    board.take({"time": 122.0, "kind": "left", "site": "a", "reason": "offline"})
    assert board.waited_for(125.0)[1][0] == "a (has left, 3 s)"
    board.take({"time": 130.0, "kind": "end", "rounds": 0, "reason": "stopped"})
    assert board.waited_for(131.0) == ([], [])


def test_without_a_terminal_there_are_lines_and_a_table_at_the_end():
    out = io.StringIO()
    with Display(Console(file=out, width=140)) as display:
        for event in EVENTS:
            display.take({"time": 0.0, **event})
        assert "fedavg" in out.getvalue()
        assert "accuracy │" not in out.getvalue()
    assert out.getvalue().count("accuracy") == 2  # a line's and the table's
    assert "gone" in out.getvalue()


def test_in_a_terminal_the_table_is_live():
    out = io.StringIO()
    with Display(Console(file=out, width=140, force_terminal=True)) as display:
        display.take({"time": 0.0, **BEGIN})
        display.say("hello [b]", 0.0)
    assert "round 1 of 3" in out.getvalue()
    assert "hello [b]" in out.getvalue()


def test_a_name_that_a_peer_has_made_up_is_text_and_gets_no_row_beside_the_sites():
    out = io.StringIO()
    with Display(Console(file=out, width=140)) as display:
        display.take({"kind": "refused", "site": "[/x]", "reason": "[/y] [red]", "time": 0.0})
        display.take({**BEGIN, "time": 0.0})
        display.take(
            {"kind": "refused", "site": "[/z]", "reason": "it is called '[/z]'", "time": 0.0}
        )
    assert "[/x] is refused: [/y] [red]" in out.getvalue()
    assert "[/z] is refused: it is called '[/z]'" in out.getvalue()
    assert list(display.status.rows) == ["a", "b", "[/x]"]
