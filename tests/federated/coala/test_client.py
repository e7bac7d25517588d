"""Clients whose training a user writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import allhands.federated as coala
from allhands.federated.failures import ClientFailedError
from tests.federated.coala.small_training import (
    flat,
    train,
)
from tests.federated.coala.small_training import fresh as _fresh  # noqa: F401


class Same(coala.BaseClient):
    """Trains by itself what the configuration says."""

    def train(self, conf, device):
        super().train(conf, device)


def test_a_client_that_trains_by_itself_gives_what_the_executor_gives():
    small = {"local_epoch": 3, "batch_size": 2, "optimizer": {"type": "Adam", "lr": 0.01}}
    ours, theirs = train(client=small), train(training=Same, client=small)
    assert (flat(ours.model) - flat(theirs.model)).abs().max() < 1e-6
    assert theirs.history["train"]["loss"] == pytest.approx(ours.history["train"]["loss"], rel=1e-5)


class Writes(coala.BaseClient):
    """Learns its own number, whatever it gets."""

    calls: list[Any] = []  # noqa: RUF012

    def __init__(self, cid, conf, train_data, test_data, device, **kwargs):
        super().__init__(cid, conf, train_data, test_data, device, **kwargs)
        self.seen = 0

    def pre_train(self):
        self.calls.append(("pre", self.cid))

    def train(self, conf, device):
        self.seen += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(self.number))

    def post_train(self):
        self.calls.append(("post", self.cid, self.seen))

    def test(self, conf, device):
        return {"seen": float(self.seen)}


def test_arbitrary_code_of_a_client_is_averaged_by_samples_and_its_attributes_last():
    Writes.calls.clear()
    result = train(training=Writes)
    expected = (0 * 5 + 1 * 9 + 2 * 3 + 3 * 7) / 24
    assert torch.allclose(flat(result.model), torch.full((83,), expected), atol=1e-6)
    assert result.history["test"] == {"round": [2], "seen": [3.0]}
    assert Writes.calls.count(("pre", "site 2")) == 3
    assert ("post", "site 2", 3) in Writes.calls
    assert all(np.isnan(result.history["train"]["loss"])), "it told no loss"


class Fails(coala.BaseClient):
    def train(self, conf, device):
        if self.cid == "site 1":
            raise ValueError("planted fault")


def test_a_client_that_fails_is_named():
    with pytest.raises(
        ClientFailedError, match="client site 1 failed:(.|\\n)*ValueError: planted fault"
    ):
        train(training=Fails)
    assert train(training=Fails, on_client_failure="skip").history["failed"] == [["site 1"]] * 3
