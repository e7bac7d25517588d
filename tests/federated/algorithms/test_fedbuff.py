"""FedBuff: the order of events, who is counted how, and what is under way."""

from __future__ import annotations

import heapq

import pytest
import torch
from torch import nn

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.algorithms import FedAvg, FedBuff
from allhands.federated.federated_settings import BufferedRounds
from allhands.federated.privacy import Privacy
from allhands.federated.rounds import Rounds
from allhands.federated.systems import Systems
from allhands.federated.update_compression import Coded
from tests.federated import simulating as sim
from tests.worlds import in_world

SIZES = sim.SIZES  # 10, 25, 17, 3: with a speed of one sample a second, also seconds


def rounds(
    algorithm: FedBuff | None = None, systems: Systems | None = None, stages=None, **options
) -> BufferedRounds:
    made = sim.rounds(
        algorithm or FedBuff(),
        kind=BufferedRounds,
        stages={"systems": systems or Systems(speed=1.0), **(stages or {})},
        **options,
    )
    assert isinstance(made, BufferedRounds)
    return made


def test_everyone_at_once_and_equally_fast_is_fedavg():
    made, plain = (
        rounds(systems=Systems(delay=1.0), number=4),
        sim.rounds(FedAvg(weighted=False), number=4),
    )
    history = made.run()
    plain.run()
    assert (made.server.weights - plain.server.weights).abs().max() < 1e-11
    assert history["staleness"] == [[0, 0, 0, 0]] * 4
    assert history["virtual_time"] == [1.0, 2.0, 3.0, 4.0]
    assert not made.states.kept


def by_hand(steps: int, buffer: int, lr: float = 0.1, exponent: float = 0.5):
    """All clients at once, so that there is nothing to draw: each begins again as soon as there is
    a version that it has not trained. Returns the model, moments of the steps, and who arrived how
    stale."""
    x, y = sim.data()
    parts = torch.arange(sum(SIZES)).split(SIZES)
    net, version, now = sim.model(), 0, 0.0
    idle, flying, came, told, moments = set(range(4)), [], [], [], []
    last = dict.fromkeys(range(4), -1)
    weights = [p.detach().clone() for p in net.parameters()]
    while version < steps:
        if not flying or flying[0][0] > now:
            for client in [client for client in sorted(idle) if last[client] < version]:
                for p, value in zip(net.parameters(), weights, strict=True):
                    p.data = value.clone()
                loss = nn.functional.mse_loss(net(x[parts[client]]), y[parts[client]])
                update = [-lr * g for g in torch.autograd.grad(loss, list(net.parameters()))]
                heapq.heappush(flying, (now + SIZES[client], client, version, update))
                idle.remove(client)
                last[client] = version
        now, client, began, update = heapq.heappop(flying)
        idle.add(client)
        came.append((client, version - began, update))
        if len(came) == buffer:
            for _, stale, update in came:
                for value, part in zip(weights, update, strict=True):
                    value.add_(part * (1 + stale) ** -exponent / buffer)
            told.append([(client, stale) for client, stale, _ in came])
            moments.append(now)
            version, came = version + 1, []
    return weights, moments, told


@pytest.mark.parametrize("buffer", [1, 2, 3])
@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_events_and_weights_are_those_of_the_loop_by_hand(buffer, executor):
    made = rounds(FedBuff(concurrency=4), number=9, per_round=buffer, executor=executor)
    history = made.run()
    weights, moments, told = by_hand(9, buffer)
    assert [
        list(zip(*pair, strict=True))
        for pair in zip(history["arrived"], history["staleness"], strict=True)
    ] == told
    assert history["virtual_time"] == moments
    assert max(map(max, history["staleness"])) > 1
    for place, value in zip(made.server.layout.parameters, weights, strict=True):
        assert (made.server.weights[place.start : place.stop] - value.view(-1)).abs().max() < 1e-11


def test_no_more_updates_are_kept_than_are_under_way():
    who = sim.clients((1, 2, 3, 4, 5) * 11)
    made = rounds(FedBuff(concurrency=6), who=who, given=sim.data(165), number=30, per_round=2)
    seen = set()
    for _ in range(30):
        made.one_round()
        assert set(made.states.kept) == {
            client for _, client, _, _ in made.buffered.flying if made.states.owner.get(client) == 0
        }
        assert len(made.buffered.flying) <= 6
        seen.update(made.history["arrived"][-1])
    assert len(seen) > 20
    history, model = made.history, made.traffic.down
    assert sum(history["bytes_up"]) == model * 60
    assert sum(history["bytes_down"]) == model * (60 + len(made.buffered.flying))


def test_drop_outs_are_replaced_and_windows_waited_for():
    who = sim.clients((3,) * 40)
    systems = Systems(speed=1.0, dropout=0.3, availability={"period": 50.0, "share": 0.5})
    history = rounds(
        FedBuff(concurrency=5), systems, who=who, given=sim.data(120), number=20, per_round=3
    ).run()
    assert sum(map(len, history["dropped"])) > 5
    assert [len(arrived) for arrived in history["arrived"]] == [3] * 20
    assert history["virtual_time"] == sorted(history["virtual_time"])


def test_where_everyone_drops_out_the_model_stays_as_it_was():
    who = sim.clients((1,) * 500)
    made = rounds(
        FedBuff(concurrency=5),
        Systems(speed=1.0, dropout=1.0),
        who=who,
        given=sim.data(500),
        number=2,
        per_round=2,
    )
    before = made.server.weights.clone()
    history = made.run()
    assert history["unchanged"] == [True, True]
    assert [len(dropped) for dropped in history["dropped"]] == [200, 200]
    assert torch.equal(before, made.server.weights)


def test_a_client_left_out_brings_nothing_later():
    x, y = sim.data()
    y = y.clone()
    y[10:35] = float("nan")  # the slowest client's
    made = rounds(
        FedBuff(concurrency=4),
        given=(x, y),
        number=8,
        per_round=2,
        stages={"on_bad_update": "skip"},
    )
    history = made.run()
    assert [1] in history["skipped"]
    assert any(1 in arrived for arrived in history["arrived"])
    assert torch.isfinite(made.server.weights).all()


def test_a_run_that_is_resumed_is_the_same_to_the_bit():
    whole, first, second = (rounds(FedBuff(concurrency=3), number=9, per_round=2) for _ in range(3))
    whole.run()
    for _ in range(4):
        first.one_round()
    assert first.states.kept
    second.server.weights.copy_(first.server.weights)
    second.load_state_dict(first.state_dict())
    second.states.load_state_dict([first.states.state_dict()])
    history = second.run()
    assert torch.equal(second.server.weights, whole.server.weights)
    for name in ("arrived", "staleness", "virtual_time"):
        assert history[name] == whole.history[name]


def test_the_same_objects_serve_another_run():
    algorithm, systems = FedBuff(concurrency=3), Systems(speed=1.0)
    first, again = (rounds(algorithm, systems, number=5, per_round=2).run() for _ in range(2))
    for name in ("arrived", "staleness", "virtual_time", "train"):
        assert first[name] == again[name]


def _run() -> list[torch.Tensor]:
    """Weights of all that depends on who trains where, or draws."""
    feedback, private = (
        Coded({"name": "topk", "keep": 0.3, "feedback": True}),
        Privacy(0.1, 1.0, delta=0.1),
    )
    common = {"number": 8, "per_round": 2, "batch_size": 4}
    all_made = (
        rounds(FedBuff(concurrency=3), **common),
        rounds(FedBuff(concurrency=3), stages={"compression": feedback}, **common),
        sim.rounds(
            stages={"compression": feedback, "systems": Systems(speed=1.0, dropout=0.3)}, **common
        ),
        sim.rounds(FedAvg(weighted=False), stages={"privacy": private}, **common),
    )
    for made in all_made:
        made.run()
    return [made.server.weights for made in all_made]


@pytest.mark.serial
def test_two_ranks_give_the_bits_of_one():
    expected = _run()
    for found in in_world(2, _run):
        assert all(torch.equal(weights, one) for weights, one in zip(found, expected, strict=True))


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="goes by the virtual time"):
        sim.rounds(FedBuff(), kind=BufferedRounds)
    with pytest.raises(UserError, match="leave deadline and over_selection out"):
        rounds(systems=Systems(deadline=1.0))
    with pytest.raises(UserError, match="write at most concurrency=4"):
        rounds(FedBuff(concurrency=5))
    with pytest.raises(UserError, match="need 5 clients.* write per_round=2"):
        rounds(FedBuff(concurrency=2))
    with pytest.raises(UserError, match="those of algorithm='fedbuff'"):
        sim.rounds(FedAvg(), kind=BufferedRounds, stages={"systems": Systems(speed=1.0)})
    with pytest.raises(UserError, match="derive the class"):
        sim.rounds(FedBuff(), kind=Rounds).run()
    assert Federated(algorithm="fedbuff").stages is BufferedRounds
    with pytest.raises(UserError, match="derive Own from"):
        Federated(algorithm="fedbuff", stages=type("Own", (Rounds,), {}))
