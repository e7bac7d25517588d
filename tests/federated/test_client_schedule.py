"""Dealing clients to devices: even by what they cost, and the rest to whoever is free."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest
import torch

from allhands.federated.client_schedule import Costs, Queue, deal, longest_first
from tests.federated import simulating as sim


def spans(
    costs: list[float],
    dealt: list[list[int]],
    speeds: list[float],
    groups: Sequence[list[int]] = (),
) -> list[float]:
    """When each device is through with its part and what it then pulls: replayed without
    waiting."""
    free = [
        (sum(costs[item] for item in part) / speed, device)
        for device, (part, speed) in enumerate(zip(dealt, speeds, strict=True))
    ]
    heapq.heapify(free)
    for group in groups:
        at, device = heapq.heappop(free)
        heapq.heappush(free, (at + sum(costs[item] for item in group) / speeds[device], device))
    return [at for at, _ in free]


def drawn(number: int = 200) -> list[float]:
    source = random.Random(5)
    return [source.lognormvariate(-3.0, 1.2) for _ in range(number)]


def test_longest_first_is_closer_to_even_than_random_dealing():
    costs, devices = drawn(), 8
    source, order = random.Random(1), list(range(len(drawn())))
    source.shuffle(order)
    by_chance = max(
        spans(costs, [order[device::devices] for device in range(devices)], [1.0] * devices)
    )
    even = sum(costs) / devices
    found = max(spans(costs, longest_first(costs, devices), [1.0] * devices))
    assert found < 1.02 * even
    assert by_chance > 1.15 * even


def test_a_slow_device_pulls_less_than_the_others():
    costs, speeds = drawn(), [1.0, 1.0, 1.0, 0.75]
    dealt, groups = deal(costs, 4)
    assert sorted(item for part in [*dealt, *groups] for item in part) == list(range(len(costs)))
    fixed = max(spans(costs, longest_first(costs, 4), speeds))
    pulled = max(spans(costs, dealt, speeds, groups))
    best = sum(costs) / sum(speeds)
    assert fixed > 1.2 * best
    assert pulled < 1.05 * best


def test_what_is_dealt_in_advance_is_about_three_quarters_and_a_pull_is_worth_the_asking():
    costs = drawn()
    dealt, groups = deal(costs, 4)
    ahead = sum(costs[item] for part in dealt for item in part) / sum(costs)
    assert 0.7 < ahead < 0.8
    worth = [sum(costs[item] for item in group) for group in groups]
    assert all(seconds >= 0.02 for seconds in worth[:-1])
    assert deal([0.0001] * 100, 4)[1] == []


def test_costs_are_steps_until_seconds_are_known_and_then_those():
    costs = Costs()
    assert costs.predict([3, 8], [10, 20]) == [10.0, 20.0]
    costs.learn([3, 8, 9], [10.0, 20.0, 0.0], [1.0, 8.0, 0.0])
    assert costs.predict([3, 8], [10, 20]) == [1.0, 8.0]
    assert costs.predict([7], [10]) == [pytest.approx(10 * 9 / 30)]
    costs.learn([3], [10.0], [2.0])
    assert costs.predict([3], [10]) == [pytest.approx(1.5)]
    again = Costs()
    again.load_state_dict(costs.state_dict())
    assert again.predict([3, 7, 8], [10, 10, 10]) == costs.predict([3, 7, 8], [10, 10, 10])


class Counted:
    """What a store's counter does, for ranks of one process."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def delete_key(self, key: str) -> bool:
        return self.counts.pop(key, None) is not None


def test_each_group_is_pulled_once(world):
    store, queues = Counted(), [Queue(world), Queue(world)]
    assert not queues[0]
    assert queues[0].pull() is None
    for rank, queue in enumerate(queues):
        queue._store, queue._rank = store, rank
        queue.begin(7, ["a", "b", "c"])
    pulled = [queues[which].pull() for which in (0, 1, 1, 0, 1)]
    assert pulled == ["a", "b", "c", None, None]
    queues[0].begin(8, [])
    assert store.counts == {}


class Halves(sim.Rounds):
    """Has half of the cohort trained from a queue, as in a world of several ranks."""

    def distribute(self, cohort):
        jobs = super().distribute(cohort)
        self.queue._store = Counted()
        self.queue.begin(self.server.round, [jobs[2:3], jobs[3:]])
        return jobs[:2]


def test_clients_from_the_queue_count_as_all_others(world):
    whole, halves = sim.rounds(batch_size=4), sim.rounds(kind=Halves, batch_size=4)
    assert whole.run()["train"] == halves.run()["train"]
    assert torch.equal(whole.server.weights, halves.server.weights)


def test_measured_seconds_are_learnt(world):
    made = sim.rounds(number=1)
    made.run()
    assert made.costs.each is not None
    assert made.costs.each > 0
