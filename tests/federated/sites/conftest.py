"""Looks are quick in memory, and what a test has made of a world ends with it."""

from __future__ import annotations

import pytest

import allhands


@pytest.fixture
def quick(monkeypatch):
    """Nothing waits for a network."""
    from allhands.federated.sites import post, roll

    for module, name, seconds in (
        (post, "_INTERVAL", 0.005),
        (post, "_LOOK", 0.02),
        (roll, "_INTERVAL", 0.005),
        (roll, "_AGAIN", 0.05),
    ):
        monkeypatch.setattr(module, name, seconds)
    yield
    allhands.finalize()  # the sites' world
