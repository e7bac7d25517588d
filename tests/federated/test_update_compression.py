"""Compression: what arrives, what is kept back, and how many bytes."""

from __future__ import annotations

import math

import pytest
import torch

from allhands.errors import UserError
from allhands.federated import Federated
from allhands.federated.algorithms import Scaffold, Server
from allhands.federated.row_layout import RowLayout
from allhands.federated.update_compression import Coded, numbers, plain_bytes
from tests.federated import simulating as sim


@pytest.fixture
def server() -> Server:
    layout = RowLayout(sim.model())
    return Server(
        layout,
        torch.zeros(layout.length, dtype=torch.float64),
        torch.zeros(0, dtype=torch.int64),
        sim.CPU,
        4,
        42,
    )


def updates(server: Server, clients: int = 3) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.zeros(clients, server.layout.length, dtype=torch.float64)
    for place in server.layout.places:
        rows[:, place.start : place.stop] = torch.randn(
            clients, place.stop - place.start, generator=drawn, dtype=torch.float64
        )
    return rows


def test_all_of_topk_loses_nothing_and_less_keeps_the_largest(server):
    given = updates(server)
    whole = given.clone()
    Coded({"name": "topk", "keep": 1.0}).narrow(whole, None, [0, 1, 2], server)
    assert torch.equal(whole, given)
    few = given.clone()
    Coded({"name": "topk", "keep": 0.1}).narrow(few, None, [0, 1, 2], server)
    count = math.ceil(0.1 * numbers(server))
    assert Coded({"name": "topk", "keep": 0.1}).sent(server) == count * (8 + 4)
    for row, full in zip(few, given, strict=True):
        assert int((row != 0).sum()) == count
        assert row[row != 0].abs().min() >= full[row == 0].abs().max()
        assert torch.equal(row[row != 0], full[row != 0])


def test_eight_bits_are_within_a_step_and_right_on_average(server):
    given = updates(server, 1)
    total, rounds = torch.zeros_like(given), 400
    assert Coded("int8").sent(server) == numbers(server) + 4 * 4
    for server.round in range(rounds):
        sent = given.clone()
        Coded("int8").narrow(sent, None, [7], server)
        total += sent
        for place in server.layout.places:
            part = slice(place.start, place.stop)
            step = given[:, part].abs().max() / 127
            assert (sent[:, part] - given[:, part]).abs().max() <= step * (1 + 1e-6)
    # The deviation of one rounding is at most half a step, of the mean of 400 a fortieth of one.
    steps = torch.zeros_like(given)
    for place in server.layout.places:
        steps[:, place.start : place.stop] = given[:, place.start : place.stop].abs().max() / 127
    assert ((total / rounds - given).abs() <= 5 * steps / 40).all()


def test_one_bit_sends_signs_and_one_size_a_tensor(server):
    given = updates(server)
    sent = given.clone()
    Coded("1bit").narrow(sent, None, [0, 1, 2], server)
    assert Coded("1bit").sent(server) == sum(
        4 + -(-(place.stop - place.start) // 8) for place in server.layout.places
    )
    for place in server.layout.places:
        part = slice(place.start, place.stop)
        assert torch.allclose(
            sent[:, part].abs(), given[:, part].abs().mean(1, keepdim=True).expand_as(sent[:, part])
        )
        assert torch.equal(sent[:, part] >= 0, given[:, part] >= 0)


@pytest.mark.parametrize("name", ["topk", "int8", "1bit", "fp16", "bf16"])
def test_what_is_lost_is_sent_later(server, name):
    way = Coded({"name": name, "feedback": True})
    given, sent, residuals = (
        updates(server),
        [],
        torch.zeros(3, server.layout.length, dtype=torch.float64),
    )
    for server.round in range(4):
        row = given.clone()
        way.narrow(row, residuals, [0, 1, 2], server)
        sent.append(row)
    assert torch.allclose(sum(sent) + residuals, 4 * given, atol=1e-12)


def test_bytes_of_a_whole_model(server):
    assert (
        plain_bytes(server)
        == 8 * numbers(server)
        == 8 * sum(p.numel() for p in sim.model().parameters())
    )


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_rounded_updates_are_half_as_long(server, name):
    given = updates(server)
    sent = given.clone()
    Coded(name).narrow(sent, None, [0, 1, 2], server)
    assert Coded(name).sent(server) == 2 * numbers(server)
    assert torch.equal(sent, given.to(torch.float16 if name == "fp16" else torch.bfloat16).double())
    assert not torch.equal(sent, given)


@pytest.mark.parametrize(
    ("compress", "said"),
    [
        (
            {"name": "topk", "keep": 0},
            r"Federated\(compress=.*keep=0 of 'topk'; it must be a number above 0, at most 1",
        ),
        ({"name": "topk", "keep": "half"}, "keep='half'"),
        ({"name": "int8", "feedback": 1}, "feedback=1; it must be True or False"),
        ({"name": "int8", "stochastic": 1}, "stochastic=1; it must be True or False"),
        ({"name": "1bit", "stochastic": True}, "no option 'stochastic'. Its options: feedback"),
        ("2bit", "chosen for gradients, and weights change by other amounts; write 'int8'"),
        ("powersgd", "which only DDP has; write 'int8'"),
    ],
)
def test_what_cannot_be_is_refused(compress, said):
    with pytest.raises(UserError, match=said):
        Federated(clients=2, compress=compress)


def test_old_spellings_warn():
    with pytest.warns(FutureWarning) as told:
        made = Federated(clients=2, compression={"name": "topk", "fraction": 0.1})
    assert made.compression.options == {"keep": 0.1, "feedback": False}
    with pytest.warns(FutureWarning, match="the codec '8bit' .*write 'int8'"):
        assert Federated(clients=2, compress="8bit").compression.options == {
            "feedback": False,
            "stochastic": True,
        }
    said = " ".join(str(one.message) for one in told)
    assert "write Federated(compress=…)" in said
    assert "the option 'fraction' of 'topk'" in said


def test_rounds_send_what_was_lost_in_later_rounds(world):
    way = Coded({"name": "topk", "keep": 0.2, "feedback": True})
    made = sim.rounds(number=4, stages={"compression": way})
    server, sizes = made.server, made.clients.sizes
    # By hand: the update of each client, of which the server gets the largest numbers, and the
    # client keeps the rest.
    residuals = torch.zeros(len(sizes), server.layout.length, dtype=torch.float64)
    for _ in range(4):
        before = server.weights.clone()
        received = torch.zeros_like(before)
        for client, size in enumerate(sizes.tolist()):
            part = made.clients.samples(client)
            net = sim.model()
            server.layout.write(before, net)
            x, y = (tensor[part] for tensor in sim.data())
            torch.nn.functional.mse_loss(net(x), y).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(0.1 * parameter.grad)
            update = server.layout.read(net) - before + residuals[client]
            sent = torch.zeros_like(update)
            largest = update.abs().topk(math.ceil(0.2 * numbers(server))).indices
            sent[largest] = update[largest]
            residuals[client] = update - sent
            received += sent * size / sizes.sum()
        made.one_round()
        assert (server.weights - before - received).abs().max() < 1e-12
    assert made.history["bytes_up"] == [4 * way.sent(server)] * 4
    assert made.history["bytes_down"] == [4 * plain_bytes(server)] * 4


@pytest.mark.parametrize("way", ["topk", "int8", "1bit", "bf16"])
def test_executors_agree_on_what_is_sent(world, way):
    coded = Coded({"name": way, "feedback": True})
    serial, stacked = (
        sim.rounds(executor=name, per_round=3, batch_size=4, stages={"compression": coded})
        for name in ("serial", "stacked")
    )
    serial.run()
    stacked.run()
    assert (serial.server.weights - stacked.server.weights).abs().max() < 1e-9


def test_bytes_of_algorithms_that_send_more(world):
    plain, more = sim.rounds(number=1, per_round=2), sim.rounds(Scaffold(), number=1, per_round=2)
    plain.run()
    more.run()
    whole = plain_bytes(plain.server)
    assert plain.history["bytes_up"] == plain.history["bytes_down"] == [2 * whole]
    assert (
        more.history["bytes_up"]
        == more.history["bytes_down"]
        == [2 * (whole + 8 * more.server.layout.trained)]
    )
    with pytest.raises(UserError, match="compress='int8'.*'scaffold' sends other vectors too"):
        sim.rounds(Scaffold(), stages={"compression": Coded("int8")})


def test_layers_that_clients_keep_do_not_travel(world):
    made = sim.rounds(number=1, stages={"local_layers": ["2"]})
    made.run()
    assert made.history["bytes_up"] == [4 * 8 * (5 * 7 + 7)]
