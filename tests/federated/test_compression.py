"""Compression: what arrives, what is kept back, and how many bytes."""

from __future__ import annotations

import pytest
import torch

from allhands.errors import UserError
from allhands.federated.algorithms import Server
from allhands.federated.compression import EightBit, OneBit, TopK, numbers, plain_bytes
from allhands.federated.layout import Layout
from tests.federated import simulating as sim


@pytest.fixture
def server() -> Server:
    layout = Layout(sim.model())
    return Server(layout, torch.zeros(layout.length, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), sim.CPU, 4, 42)


def updates(server: Server, clients: int = 3) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.zeros(clients, server.layout.length, dtype=torch.float64)
    for place in server.layout.places:
        rows[:, place.start : place.stop] = torch.randn(clients, place.stop - place.start, generator=drawn, dtype=torch.float64)
    return rows


def test_all_of_topk_loses_nothing_and_less_keeps_the_largest(server):
    given = updates(server)
    whole = given.clone()
    TopK(1.0).narrow(whole, None, [0, 1, 2], server)
    assert torch.equal(whole, given)
    few = given.clone()
    sent = TopK(0.1).narrow(few, None, [0, 1, 2], server)
    count = round(0.1 * numbers(server.layout))
    assert sent == count * (8 + 4)
    for row, full in zip(few, given, strict=True):
        assert int((row != 0).sum()) == count
        assert row[row != 0].abs().min() >= full[row == 0].abs().max()
        assert torch.equal(row[row != 0], full[row != 0])


def test_eight_bits_are_within_a_step_and_right_on_average(server):
    given = updates(server, 1)
    total, rounds = torch.zeros_like(given), 400
    for server.round in range(rounds):
        sent = given.clone()
        assert EightBit().narrow(sent, None, [7], server) == numbers(server.layout) + 4 * 4
        total += sent
        for place in server.layout.places:
            part = slice(place.start, place.stop)
            step = given[:, part].abs().max() / 127
            assert (sent[:, part] - given[:, part]).abs().max() <= step * (1 + 1e-9)
    # The deviation of one rounding is at most half a step, of the mean of 400 a fortieth of one.
    steps = torch.zeros_like(given)
    for place in server.layout.places:
        steps[:, place.start : place.stop] = given[:, place.start : place.stop].abs().max() / 127
    assert ((total / rounds - given).abs() <= 5 * steps / 40).all()


def test_one_bit_sends_signs_and_one_size_a_tensor(server):
    given = updates(server)
    sent = given.clone()
    assert OneBit().narrow(sent, None, [0, 1, 2], server) == -(-numbers(server.layout) // 8) + 4 * 4
    for place in server.layout.places:
        part = slice(place.start, place.stop)
        assert torch.allclose(sent[:, part].abs(), given[:, part].abs().mean(1, keepdim=True).expand_as(sent[:, part]))
        assert torch.equal(sent[:, part] >= 0, given[:, part] >= 0)


@pytest.mark.parametrize("way", [TopK(0.1, feedback=True), EightBit(feedback=True), OneBit()])
def test_what_is_lost_is_sent_later(server, way):
    given, sent, residuals = updates(server), [], torch.zeros(3, server.layout.length, dtype=torch.float64)
    for server.round in range(4):
        row = given.clone()
        way.narrow(row, residuals, [0, 1, 2], server)
        sent.append(row)
    assert torch.allclose(sum(sent) + residuals, 4 * given, atol=1e-12)


def test_bytes_of_a_whole_model(server):
    assert plain_bytes(server) == 8 * numbers(server.layout) == 8 * sum(p.numel() for p in sim.model().parameters())


@pytest.mark.parametrize("fraction", [0, 1.5, -1, "half"])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(UserError, match="fraction=.*above 0 and at most 1"):
        TopK(fraction)
