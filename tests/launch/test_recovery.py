"""What is decided when a worker, a server or a host is lost, without any process."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.errors import UserError
from allhands.launch.options import Options
from allhands.launch.output import Output
from allhands.launch.recovery import Recovery
from allhands.launch.worker_report import Worker


class Stage:
    """Two hosts with a worker each, and a server on those of `servers`; nothing runs."""

    def __init__(self, servers: tuple[int, ...], **options: Any) -> None:
        self.said: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.recovery = Recovery(**options, say=self.said.append)
        ranks = [
            [*(-1 - number for number, host in enumerate(servers) if host == index), index]
            for index in range(2)
        ]
        self.agents: list[Any] = [
            SimpleNamespace(
                ranks=there,
                lost=False,
                local=False,
                host=f"d{index}",
                send=lambda **asked: self.sent.append(asked),
            )
            for index, there in enumerate(ranks)
        ]
        self.workers = {
            rank: Worker(rank, agent.host) for agent in self.agents for rank in agent.ranks
        }
        env = {"TORCHELASTIC_RESTART_COUNT": "0"}
        tasks = [[{"rank": rank, "env": env} for rank in there] for there in ranks]
        self.recovery.begin(self.agents, self.workers, tasks, Output(), grace=5.0)

    def lose(self, host: int) -> list[int]:
        """The ranks that are blamed for the end when a host is lost."""
        self.agents[host].lost = True
        for rank in self.agents[host].ranks:
            self.workers[rank].lost, self.workers[rank].lost_at = "no word from it", 1.0
        self.recovery.act()
        return [worker.rank for worker in self.recovery.blamed()]


def test_a_lost_host_counts_as_its_workers_unless_it_carries_more() -> None:
    going_on = Stage((0,), on_worker_failure="continue")
    assert going_on.lose(1) == []
    assert going_on.said == ["rank 1 on host d1 failed: no word from it; the others go on"]
    assert [worker.rank for worker in going_on.recovery.excused()] == [1]
    assert Stage((0,), on_worker_failure="continue").lose(0) == [-1, 0], (
        "the first host carries the store"
    )
    assert Stage((0, 1), on_worker_failure="continue", server_restarts=9).lose(1) == [-2, 1], (
        "a server is not moved"
    )
    assert Stage((0,), on_worker_failure="restart", max_restarts=9).lose(1) == [1], (
        "a worker is not moved"
    )


def test_restarts_are_counted_together_and_only_while_they_help() -> None:
    stage = Stage((0, 1), on_worker_failure="restart", max_restarts=1, server_restarts=1)
    for rank in (0, 1, -1, -2):
        stage.workers[rank].exit, stage.workers[rank].exit_at = {"code": 7}, 5.0
    stage.recovery.act()
    assert [asked["worker"]["env"] for asked in stage.sent] == [
        {"TORCHELASTIC_RESTART_COUNT": "0", "ALLHANDS_WORKER_RESTART": "1"},
        {"TORCHELASTIC_RESTART_COUNT": "0", "ALLHANDS_SERVER_RESTART": "1"},
    ]
    assert {worker.rank for worker in stage.recovery.blamed()} == {-2, 1}
    late = Stage((0,), server_restarts=1)
    for rank in (0, 1):
        late.workers[rank].exit = {"code": 0}
    late.workers[-1].exit = {"code": 7}
    late.recovery.act()
    assert late.sent == [], "no worker is left that needs it"


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("RuntimeError: gloo: Connection reset by peer", True),
        ("WorldError: the members of the world have changed again", True),
        ("WorldError: this worker cannot take part: its script is another version", False),
    ],
)
def test_one_that_is_interrupted_as_it_joins_is_started_again(text: str, starts: bool) -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    members = stage.recovery.members
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    members.take_up(0, 1, repeated=True)
    stage.recovery.act()
    members.ask_to_join(1)
    assert members.ranks == [0, 1]
    assert not members.trains(1)
    stage.sent.clear()
    worker = stage.workers[1]
    worker.note("raised", {"value": {"text": text}}, 1.0)
    worker.note("exit", {"code": 1, "own": True}, 1.0)
    stage.recovery.act()
    members.take_up(0, members.epoch, repeated=True)
    stage.recovery.act()
    assert any(asked["op"] == "again" for asked in stage.sent) == starts
    assert not stage.recovery.blamed()


def test_a_lost_worker_starts_once_the_others_have_repeated_what_was_interrupted() -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    stage.recovery.members.take_up(0, 1)
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish"]
    stage.recovery.members.take_up(0, 1, repeated=True)
    stage.recovery.act()
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish", "again"]


def test_it_starts_without_them_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allhands.launch.recovery._START_BY_S", 0.0)
    stage = Stage((), elastic=True, max_restarts=9)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    assert [asked["op"] for asked in stage.sent] == ["publish", "again"]


def test_those_that_are_left_are_told_that_nobody_goes_on() -> None:
    stage = Stage((), elastic=True, max_restarts=9)
    stage.recovery.members.lay_out(2, 1)
    stage.workers[1].note("exit", {"signal": 9, "own": True}, 1.0)
    stage.recovery.act()
    stage.recovery.act()
    told = [asked["key"] for asked in stage.sent if asked["op"] == "publish"]
    assert told == ["attempt0/elastic/over"]
    assert [worker.rank for worker in stage.recovery.blamed()] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_restarts": -1, "servers": 1}, "server_restarts=-1: it must be at least 0"),
        (
            {"server_restarts": 3},
            "servers=0; start some (-s 1), or write max_restarts (--max-restarts)",
        ),
        (
            {"on_worker_failure": "ignore", "servers": 1},
            "'ignore'; it must be one of 'stop', 'continue', 'restart'",
        ),
        (
            {"on_worker_failure": "continue"},
            "needs parameter servers: workers that talk to one another in collectives cannot",
        ),
        (
            {"on_worker_failure": "restart", "max_restarts": 2},
            "or write max_restarts (--max-restarts) alone",
        ),
        (
            {"on_worker_failure": "restart", "servers": 1},
            "without max_restarts: set how many times (--max-restarts 3)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Options(**options).check()
