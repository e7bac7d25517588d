"""The executor that is chosen by itself, and options of executors."""

from __future__ import annotations

import pytest

from allhands.errors import UserError
from allhands.federated.strategy import Federated
from tests.federated import simulating as sim
from tests.federated.executors.comparing import Pulled, difference


def test_options_of_executors_are_checked_by_name():
    for given, why in (
        ("stackd", "did you mean 'stacked'"),
        ({"name": "stacked", "chunks": 3}, "did you mean 'chunk'"),
        ({"name": "serial", "chunk": 3}, "takes: none"),
        ({"name": "stacked", "chunk": 0}, "chunk=0"),
        ({"name": "stacked", "compile": "yes"}, "compile='yes'"),
        ({"name": "stacked", "record": True}, "needs CUDA"),
        ("graph", "executor='serial'"),
    ):
        with pytest.raises(UserError, match=why):
            sim.rounds(executor=given)
    with pytest.raises(UserError, match="did you mean 'stacked'"):
        Federated(executor="stackd")


def test_on_a_processor_auto_is_serial():
    assert type(sim.rounds(executor="auto").executor.chosen).name == "serial"
    assert difference(["serial", "auto"], batch_size=4) == 0.0


def test_auto_tries_what_does_not_refuse_and_says_what_it_has_measured(capsys):
    made = sim.rounds(Pulled(), executor="auto", batch_size=4)
    made.executor.chosen = None  # as on a GPU
    made.run()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"executor: {made.executor.chosen.name} (a step of a client: serial ")
    assert "graph refuses: it records CUDA graphs, and the device is 'cpu'" in said[0]
    assert said[0].count(" ms") == 2
    expected = sim.rounds(Pulled(), batch_size=4)
    expected.run()
    assert (made.server.weights - expected.server.weights).abs().max() < 1e-12
    assert made.history["cohort"] == expected.history["cohort"]
