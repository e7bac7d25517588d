"""Training across sites in memory: the simulation's weights to the bit."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from tests.federated.sites.across import grid, same, serve, simulate

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("options", [
    {}, {"algorithm": "scaffold"}, {"algorithm": "fednova"}, {"algorithm": "qfedavg"}, {"algorithm": "fedprox"},
    {"algorithm": "fedadam"}, {"algorithm": "median"}, {"per_round": 2}, {"local_layers": ["3"]},
    {"compression": {"name": "topk", "fraction": 0.2, "feedback": True}}, {"compression": "8bit"},
    {"algorithm": {"name": "fedavg", "weighted": False}, "privacy": {"clip": 0.5, "noise_multiplier": 0.0}},
], ids=str)  # fmt: skip
def test_weights_are_those_of_the_simulation(tmp_path, options):
    norm = not options or "per_round" in options  # what BatchNorm counts travels too
    there, history = serve(grid(tmp_path, norm, **options), norm, **options)
    here, expected = simulate(norm, **options)
    assert same(there, here)
    assert history["train"]["loss"] == expected["train"]["loss"]
    assert history["cohort"] == expected["cohort"]
    for kind in ("failed", "skipped", "absent"):
        assert not any(history[kind])
