"""Virtual time: who comes back when, what the clock shows, and who is selected."""

from __future__ import annotations

import time

import pytest
import torch

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.algorithms import FedAvg
from allhands.federated.clients import Clients
from allhands.federated.privacy import Privacy
from allhands.federated.systems import Systems, coala_delays
from allhands.federated.update_compression import Coded, plain_bytes
from tests.federated import simulating as sim

SIZES = sim.SIZES  # 10, 25, 17, 3

pytestmark = pytest.mark.usefixtures("world")


def rounds(number: int = 1, per_round: int | None = None, who: Clients | None = None, **options):
    return sim.rounds(
        number=number, per_round=per_round, who=who, stages={"systems": Systems(**options)}
    )


def test_a_round_takes_as_long_as_its_slowest_client_and_the_model_is_the_same():
    made, plain = rounds(3, speed=2.0, download=100.0, upload=50.0, delay=0.5), sim.rounds(number=3)
    whole = plain_bytes(made.server)
    expected = 0.5 + whole / 100 + max(SIZES) / 2 + whole / 50
    history = made.run()
    assert history["virtual_seconds"] == pytest.approx([expected] * 3)
    assert history["virtual_time"] == pytest.approx([expected, 2 * expected, 3 * expected])
    assert history["arrived"] == [[0, 1, 2, 3]] * 3
    plain.run()
    assert torch.equal(made.server.weights, plain.server.weights)


def test_compression_shortens_the_way_up():
    way = Coded({"name": "topk", "keep": 0.1})
    made = sim.rounds(number=1, stages={"systems": Systems(upload=1.0), "compression": way})
    assert made.run()["virtual_seconds"] == [way.sent(made.server)]


def test_what_is_later_than_the_deadline_is_lost_and_not_trained():
    made = rounds(speed=1.0, deadline=18.0)
    history = made.run()
    assert history["arrived"] == [[0, 2, 3]]
    assert history["late"] == [[1]]
    assert history["virtual_seconds"] == [18.0]
    assert history["cohort"] == [[0, 1, 2, 3]]
    parts = [made.clients.samples(client) for client in (0, 2, 3)]
    expected = sim.loop(sim.model(), parts, sim.data(), 1, 0.1)
    assert (made.server.layout.read(expected) - made.server.weights).abs().max() < 1e-12
    assert history["bytes_up"][0] == 3 / 4 * history["bytes_down"][0]


def test_over_selection_keeps_the_first_that_arrive():
    made = rounds(2, per_round=2, speed=1.0, over_selection=1.0)
    history = made.run()
    assert history["arrived"] == [[0, 3]] * 2
    assert history["late"] == [[1, 2]] * 2
    assert history["virtual_seconds"] == [10.0, 10.0]
    with pytest.raises(UserError, match=r"selects 5 of 4 clients; write at most over_selection=1,"):
        rounds(per_round=2, speed=1.0, over_selection=1.5)


def test_drop_outs_are_named_and_a_round_without_anyone_keeps_the_model():
    made = rounds(speed=1.0, dropout=[0.0, 1.0, 0.0, 1.0])
    history = made.run()
    assert history["arrived"] == [[0, 2]]
    assert history["dropped"] == [[1, 3]]
    assert 17 <= history["virtual_seconds"][0] <= 25
    nobody = rounds(speed=1.0, dropout=1.0)
    before = nobody.server.weights.clone()
    history = nobody.run()
    assert history["unchanged"] == [True]
    assert history["arrived"] == [[]]
    assert torch.equal(before, nobody.server.weights)


def test_only_clients_that_can_be_had_are_selected_and_the_clock_waits_for_them():
    sizes = (1,) * 50
    made = sim.rounds(
        number=40,
        per_round=3,
        who=sim.clients(sizes),
        given=sim.data(50),
        stages={"systems": Systems(delay=3.0, availability={"period": 100.0, "share": 0.1})},
    )
    systems, selected = made.systems, []
    for _ in range(40):
        made.one_round()
        history = made.history
        began = (
            history["virtual_time"][-1] - 3.0
            if history["late"][-1] == [] and not history["dropped"][-1]
            else None
        )
        for client in history["cohort"][-1]:
            if began is not None:
                opens, closes = systems.window(client, began)
                assert opens == 0.0
                assert closes >= 3.0
        selected += history["cohort"][-1]
    assert any(history["dropped"])  # whose windows closed
    assert len(set(selected)) > 25


def test_who_has_no_window_now_is_waited_for():
    made = rounds(
        2,
        per_round=1,
        who=Clients([range(55)]),
        delay=1.0,
        availability={"period": 100.0, "share": 0.1},
    )
    systems = made.systems
    opens, _ = systems.window(0, 0.0)
    assert opens > 0  # with this seed
    history = made.run()
    assert history["virtual_time"][0] == pytest.approx(opens + 1.0)
    assert history["arrived"][0] == [0]


def test_profiles_depend_on_the_seed_and_the_client_only():
    made = rounds(
        who=sim.clients((1,) * 55),
        speed={"name": "lognormal", "median": 10.0, "sigma": 0.5},
        delay={"name": "table", "values": [1.0, 2.0]},
    )
    systems = made.systems
    drawn = [systems.speed.of(client, 7) for client in range(2000)]
    logs = torch.tensor(drawn, dtype=torch.float64).log()
    assert float(logs.mean()) == pytest.approx(2.3026, abs=0.05)
    assert float(logs.std()) == pytest.approx(0.5, abs=0.03)
    assert drawn[5] == systems.speed.of(5, 7) != systems.speed.of(5, 8)
    assert {systems.delay.of(client, 7) for client in range(20)} == {1.0, 2.0}


def test_a_selection_does_not_look_at_all_clients():
    made = sim.rounds(number=1, stages={"systems": Systems(speed=1.0)})
    systems = Systems(delay=1.0, availability={"period": 100.0, "share": 0.5})
    systems.begin(
        Clients.from_arrays(torch.zeros(0).numpy(), torch.zeros(1_000_001).numpy()),
        made.work.local,
        made.traffic,
        42,
        100,
    )
    began = time.process_time()
    assert len(systems.select(100, 0)) == 100
    assert time.process_time() - began < 0.5


def test_a_run_that_is_resumed_goes_on_with_its_clock():
    whole, first, second = (rounds(4, speed=1.0, per_round=2) for _ in range(3))
    whole.run()
    first.one_round()
    first.one_round()
    second.server.weights.copy_(first.server.weights)
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.history["virtual_time"] == whole.history["virtual_time"]
    assert torch.equal(second.server.weights, whole.server.weights)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": 0}, "systems: speed=0; it must be a number above 0"),
        ({"speed": "fast"}, "it must be a number, a list"),
        ({"speed": [1.0, 2.0]}, "speed has 2 numbers for 4 clients"),
        ({"dropout": 1.5}, "at least 0 and at most 1"),
        ({"availability": 0.5}, "write {'period': seconds"),
        ({"speed": {"name": "normal"}}, "'lognormal'"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        rounds(**options)


def test_privacy_needs_cohorts_that_devices_do_not_decide():
    with pytest.raises(UserError, match="leave out availability, dropout"):
        sim.rounds(
            FedAvg(weighted=False),
            stages={"privacy": Privacy(1.0, 0.0), "systems": Systems(deadline=1.0)},
        )
    with pytest.raises(UserError, match="there is no option 'sped'"):
        Federated(systems={"sped": 1.0})


def test_delays_of_coala():
    even = coala_delays("iso", 10, 1, level=3, total_time=100.0)
    assert sum(even) == pytest.approx(100.0)
    steps = torch.tensor(sorted(even)).diff()
    assert torch.allclose(steps, steps[0].expand(9))
    assert min(even) / max(even) == pytest.approx(0.2 / (0.2 + 0.6 * 0.9))
    few = coala_delays("dir", 10, 1, level=2, groups=3, fraction=0.5, total_time=7.0)
    assert sum(few) == pytest.approx(7.0)
    assert sum(delay > 0 for delay in few) == 5
    assert len(set(few)) == 4
    assert few == coala_delays("dir", 10, 1, level=2, groups=3, fraction=0.5, total_time=7.0)
    assert few != coala_delays("dir", 10, 2, level=2, groups=3, fraction=0.5, total_time=7.0)
    assert coala_delays("real", 4, 1, level=0, total_time=8.0) == [2.0] * 4
    assert {round(delay, 9) for delay in coala_delays("real", 50, 1, speeds=[1.0, 3.0])} <= {
        round(1000.0 * speed / total, 9) for speed in (1.0, 3.0) for total in range(50, 151)
    }
    with pytest.raises(UserError, match="speeds of real devices"):
        coala_delays("real", 4, 1)
    made = rounds(delay=coala_delays("iso", 4, 1, total_time=10.0))
    assert made.run()["virtual_seconds"][0] == pytest.approx(
        max(coala_delays("iso", 4, 1, total_time=10.0))
    )
