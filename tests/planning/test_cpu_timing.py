"""Steps on processors: what holds them up, what runs beside them, and pipelines side by side."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.comm.traffic import Collective
from allhands.planning.cpu_timing import PipelineSimulation, cpu_step_time
from allhands.planning.dry_step import DryStep
from allhands.planning.machines import CARDS
from allhands.planning.operation import Operation
from allhands.planning.operation_times import OperationTimes
from allhands.planning.step_correction import StepCorrection
from allhands.planning.timing import Places

ONE = Operation("compute", 0, 0, 4)
TIMES = OperationTimes(CARDS["cpu"], {ONE.key: 1.0})
PLACES = Places({}, frozenset())


class OneByteASecond:
    """Links on which a byte takes a second, and a tenth of one of the processor."""

    def seconds(self, sent: float, kind: str, size: int, hosts: int) -> float:
        return sent

    def cpu(self, sent: float, kind: str, size: int, hosts: int) -> float:
        return sent / 10


LINKS: Any = OneByteASecond()


def step(*events: tuple[str, Any]) -> DryStep:
    return DryStep(0, {}, list(events), {}, False)


def all_reduce(payload: int, asynchronous: bool) -> Collective:
    return Collective("all_reduce", payload, 2, "", -1, asynchronous)


def time_of(*events: tuple[str, Any]) -> Any:
    return cpu_step_time(step(*events), TIMES, LINKS, PLACES)


def test_a_collective_that_is_waited_for_holds_up_what_follows() -> None:
    found = time_of(("forward", ONE), ("backward", all_reduce(5, False)), ("backward", ONE))
    assert found.total == pytest.approx(1 + 5 + 1)
    assert found.waiting == pytest.approx(5)


def test_sums_run_beside_the_backward_pass_and_are_waited_for_before_the_update() -> None:
    compute = [("backward", ONE)] * 10
    found = time_of(("backward", all_reduce(5, True)), *compute, ("update", ONE))
    # It is hidden, but for the processor's time that it takes.
    assert found.total == pytest.approx(10 + 0.5 + 1)
    found = time_of(*compute, ("backward", all_reduce(5, True)), ("update", ONE))
    assert found.total == pytest.approx(10 + 5 + 1)
    # One after another.
    found = time_of(*[("backward", all_reduce(5, True))] * 2, ("update", ONE))
    assert found.total == pytest.approx(5 + 5 + 1)


def test_operations_are_corrected_by_what_steps_took() -> None:
    times = OperationTimes(CARDS["cpu"], TIMES.known, None, StepCorrection(2.0, 0.5, 0.25))
    found = cpu_step_time(step(("forward", ONE), ("update", ONE)), times, LINKS, PLACES)
    assert found.total == pytest.approx(2.5 + 1.25)


def test_a_collective_waits_for_the_last_rank() -> None:
    spread = StepCorrection(spread=0.5)
    times = OperationTimes(CARDS["cpu"], TIMES.known, None, spread)
    ops = [("backward", ONE)] * 4

    def total(*events: tuple[str, Any]) -> float:
        return cpu_step_time(step(*events), times, LINKS, PLACES).total

    # The standard deviation of four seconds is twice that of one.
    late = spread.later(4.0, 2)
    assert late == pytest.approx(2 * 0.5 * 0.589, rel=1e-2)
    assert total(*ops, ("backward", all_reduce(5, False))) == pytest.approx(4 + late + 5)
    assert total(*ops, ("backward", all_reduce(5, True))) == pytest.approx(4 + late + 5)
    # Ranks that have just waited for one another are not apart.
    assert total(*ops, *[("backward", all_reduce(5, False))] * 2) == pytest.approx(4 + late + 10)
    assert spread.later(4.0, 1) == 0.0
    assert spread.later(4.0, 64) > 3 * late


def message(kind: str, peer: int, payload: int = 2) -> tuple[str, Any]:
    return "forward", Collective(kind, payload, 2, "", peer)


def simulated(*ranks: list[tuple[str, Any]]) -> Any:
    steps = [step(*events) for events in ranks]
    return PipelineSimulation(steps, TIMES, LINKS, [PLACES] * len(steps)).run()


def test_stages_wait_for_one_another() -> None:
    op = ("forward", ONE)
    # Two micro-batches forward: the second stage begins when the first message is there.
    first = [op, message("send", 1), op, message("send", 1)]
    second = [message("recv", 0), op, message("recv", 0), op]
    found = simulated(first, second)
    # The second message begins once the second stage is ready for it.
    assert found.total == pytest.approx(1 + 2 + 1 + 2 + 1)
    assert found.compute == pytest.approx(2)


def test_messages_in_both_directions_do_not_hold_one_another_up() -> None:
    both = [[message("send", 1), message("recv", 1)], [message("send", 0), message("recv", 0)]]
    assert simulated(*both).total == pytest.approx(2)


def test_the_word_that_a_rank_is_ready_comes_behind_what_it_sends() -> None:
    op = ("forward", ONE)
    # The first stage is ready; the second one sends, and then says that it is ready to receive.
    first = [message("send", 1), message("recv", 1)]
    second = [op, message("send", 0), message("recv", 0)]
    assert simulated(first, second).total == pytest.approx(1 + 2 + 2)
    # It says so first.
    second = [op, message("recv", 0), message("send", 0)]
    assert simulated(first, second).total == pytest.approx(1 + 2)


def test_a_message_begins_when_both_are_ready() -> None:
    op = ("forward", ONE)
    found = simulated([message("send", 1)], [op, op, op, message("recv", 0)])
    assert found.total == pytest.approx(3 + 2)


def test_messages_that_nobody_sends_are_no_schedule() -> None:
    assert simulated([message("recv", 1)], [message("recv", 0)]) is None
