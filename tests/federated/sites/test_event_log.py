"""Events: written line by line, and read while they grow."""

from __future__ import annotations

import json
import threading
import time

from allhands.federated.sites.event_log import EventLog, EventReader, follow


def test_what_was_said_is_read_in_order(tmp_path):
    path = tmp_path / "logs" / "events.jsonl"
    events = EventLog(path)
    events.say("greeted", site="süd", samples=3)
    events.say(
        "round_end",
        round=0,
        loss=float("nan"),
        values={"valid": {"loss": float("inf"), "accuracy": 0.5}},
    )
    events.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["greeted", "round_end"]
    assert lines[0]["site"] == "süd"
    assert lines[0]["time"] <= time.time()
    assert lines[1]["loss"] is None
    assert lines[1]["values"] == {"valid": {"loss": None, "accuracy": 0.5}}


def test_a_line_that_is_not_whole_comes_later(tmp_path):
    path = tmp_path / "events.jsonl"
    follower = EventReader(path)
    assert follower.news() == []
    path.write_bytes(b'{"kind": "a"}\n{"kind"')
    assert follower.news() == [{"kind": "a"}]
    assert follower.news() == []
    with path.open("ab") as file:
        file.write(b': "b"}\n')
    assert follower.news() == [{"kind": "b"}]
    assert EventReader(path, from_end=True).news() == []


def test_following_ends_with_the_end(tmp_path):
    path = tmp_path / "events.jsonl"

    def write() -> None:
        events = EventLog(path)
        for number in range(3):
            events.say("round_end", round=number)
            time.sleep(0.02)
        events.say("end", reason="finished")
        events.close()

    writer = threading.Thread(target=write)
    writer.start()
    kinds = [event["kind"] for event in follow(path, interval=0.01)]
    writer.join()
    assert kinds == ["round_end"] * 3 + ["end"]


def test_without_a_file_nothing_is_kept(tmp_path):
    EventLog(None).say("begin")
    assert list(tmp_path.iterdir()) == []
