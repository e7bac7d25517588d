"""Who takes part in an elastic job: losses at once, arrivals one change later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allhands.errors import UserError
from allhands.launch.elastic_members import ElasticMembers
from allhands.launch.options import Options


class Store:
    """What was published, newest last."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []

    def __call__(self, key: str, value: str) -> None:
        self.changes.append(json.loads(value))
        assert key == f"elastic/membership/{len(self.changes)}"


def members(store: Store, workers: int, spares: int = 0) -> ElasticMembers:
    made = ElasticMembers(store)
    ranks = list(range(workers + spares))
    made.begin(ranks, ranks[workers:])
    return made


def test_a_lost_worker_leaves_at_once_and_another_joins_once_that_is_taken_up() -> None:
    store = Store()
    job = members(store, 3)
    job.lose(1, "rank 1: killed")
    assert store.changes == [
        {"epoch": 1, "members": [0, 2], "lost": ["rank 1: killed"], "joined": []}
    ]
    job.ask_to_join(1)
    assert len(store.changes) == 1, "the others have not made up for the loss yet"
    job.take_up(2, 1)
    assert store.changes[1] == {"epoch": 2, "members": [0, 2, 1], "lost": [], "joined": [1]}
    assert job.trains(2)
    assert not job.trains(1), "it is a member, and has not got the state of the others"
    job.take_up(2, 2)
    assert job.is_taken_up
    assert not job.trains(1)
    job.take_up(1, 2)
    assert job.trains(1)


def test_one_that_was_about_to_join_waits_again_when_another_is_lost() -> None:
    store = Store()
    job = members(store, 3)
    job.lose(0, "rank 0: killed")
    job.take_up(2, 1)
    job.ask_to_join(0)
    job.lose(2, "rank 2: killed")
    assert store.changes[-1] == {
        "epoch": 3,
        "members": [1],
        "lost": ["rank 2: killed"],
        "joined": [],
    }
    job.take_up(2, 3)
    assert store.changes[-1]["members"] == [1, 0]


def test_two_losses_are_told_together_as_long_as_none_is_taken_up() -> None:
    store = Store()
    job = members(store, 3)
    job.lose(0, "first")
    job.lose(1, "second")
    assert store.changes[-1]["lost"] == ["first", "second"]
    assert store.changes[-1]["members"] == [2]


def test_spare_workers_wait_until_one_is_missing() -> None:
    store = Store()
    job = members(store, 2, spares=2)
    job.ask_to_join(2)
    job.ask_to_join(3)
    assert not store.changes
    job.lose(0, "lost")
    job.take_up(2, 1)
    assert store.changes[-1]["members"] == [1, 2]
    job.lose(3, "a spare one is no member")
    assert len(store.changes) == 2


def test_workers_that_are_added_take_part_though_none_is_missing_and_before_spare_ones() -> None:
    store = Store()
    job = members(store, 2, spares=1)
    job.ask_to_join(2)
    job.add([3, 4])
    assert not job.is_spare(3)
    job.ask_to_join(3)
    assert store.changes[-1]["members"] == [0, 1, 3]
    job.take_up(0, 1)
    job.ask_to_join(4)
    assert store.changes[-1]["members"] == [0, 1, 3, 4]
    job.take_up(0, 2)
    assert job.is_spare(2)
    job.lose(3, "lost")
    job.take_up(0, 3)
    assert store.changes[-1]["members"] == [0, 1, 4, 2], "the place of one that was added too"
    assert not job.is_spare(2)


def test_workers_that_hold_a_copy_of_a_model_together_leave_and_join_together() -> None:
    store = Store()
    job = members(store, 6)
    job.lay_out(copy_size=2, copy_runs=1)
    assert job.left_without([3]) == [0, 1, 4, 5]
    assert job.left_without([1, 2, 5]) == []
    assert job.lose(3, "rank 3: killed") == [2]
    assert store.changes[-1] == {
        "epoch": 1,
        "members": [0, 1, 4, 5],
        "lost": ["rank 3: killed, and with it rank 2 of its copy of the model"],
        "joined": [],
        "apart": [2],
    }
    assert job.lose(2, "it has left") == [], "it is no member any more"
    job.take_up(0, 1)
    job.ask_to_join(3)
    assert len(store.changes) == 1, "one alone makes no copy"
    job.ask_to_join(2)
    assert store.changes[-1] == {
        "epoch": 2,
        "members": [0, 1, 4, 5, 3, 2],
        "lost": [],
        "joined": [3, 2],
    }
    # One of the new ones is lost before anybody has taken it up: the other waits again.
    assert job.lose(3, "lost") == []
    assert store.changes[-1]["members"] == [0, 1, 4, 5]
    job.take_up(0, 3)
    job.ask_to_join(3)
    assert store.changes[-1]["members"] == [0, 1, 4, 5, 2, 3]


def test_stages_of_a_pipeline_stay_in_the_order_of_the_ranks() -> None:
    store = Store()
    job = members(store, 4)
    job.lay_out(copy_size=2, copy_runs=2)  # ranks 0, 2 and 1, 3
    assert job.lose(0, "lost") == [2]
    assert store.changes[-1]["members"] == [1, 3]
    job.take_up(1, 1)
    job.ask_to_join(2)
    job.ask_to_join(0)
    assert store.changes[-1]["members"] == [1, 2, 3, 0], "stage 0 of both, and stage 1 of both"


def test_a_worker_that_has_come_to_its_end_leaves_alone() -> None:
    store = Store()
    job = members(store, 4)
    job.lay_out(copy_size=2, copy_runs=1)
    assert job.lose(0, "rank 0 has come to its end", at_end=True) == []
    assert store.changes[-1]["members"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(workers=2, max_workers=4), "max_workers=4 is about hosts that join"),
        (Options(workers=3, elastic=True, max_workers=2), "max_workers=2 is less than workers=3"),
        (Options(elastic=True, max_workers=0), "max_workers=0"),
        (Options(spares=1), "spares=1 is about workers that take the place of lost ones"),
        (Options(spares=1, elastic=True), "needs the number of workers beside them"),
        (Options(elastic=True, servers=1), "workers with servers need none"),
        (Options(spares=-1), "spares"),
    ],
    ids=[
        "not-elastic",
        "fewer-than-there-are",
        "none",
        "spares-alone",
        "spares-of-how-many",
        "servers",
        "negative",
    ],
)
def test_options_that_contradict_one_another_are_refused(options: Options, said: str) -> None:
    with pytest.raises(UserError, match=said):
        options.check()


def test_fewer_workers_may_be_left_without_restarts() -> None:
    Options(workers=4, elastic=True, min_workers=2).check()
