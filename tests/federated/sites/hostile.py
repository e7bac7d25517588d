"""What tests of wrong, broken and ill-meaning peers share: runs across sites in memory, and the
simulation to compare them with.

The site west is the one that misbehaves. The reference is a simulation in one process: with a west
whose model comes out with NaN and so is left out of every round, or without west.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import allhands
from allhands.federated.sites import site_training
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.site_training import Across
from tests.federated.sites import across as trial
from tests.federated.sites.fake_grid import FakeGrid

WEST, NODE, ROUNDS = "west", 103, 2
HONEST = ["north", "east", "south"]
BRIEF = {"local_epochs": 1}
NOISE = bytes(range(256))


@pytest.fixture(autouse=True)
def a_world_and_no_waiting(monkeypatch) -> Iterator[None]:
    from allhands.federated.sites import post, roll

    monkeypatch.setattr(post, "_INTERVAL", 0.005)
    monkeypatch.setattr(roll, "_INTERVAL", 0.005)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are so small that threads only wait for one another
    allhands.init(device="cpu")
    yield
    allhands.finalize()
    torch.set_num_threads(threads)


def run(
    grid: FakeGrid | Across,
    folder: Path,
    rounds: int = ROUNDS,
    options: dict[str, Any] | None = None,
    **sites: Any,
) -> tuple[torch.nn.Module, dict[str, Any], list[dict[str, Any]]]:
    """The model, the history and the events of a run for which three sites are enough."""
    path = folder / "events.jsonl"
    # Events alone: a logdir would have checkpoints written.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_training, "EventLog", lambda _: EventLog(path))
        model, history = trial.serve(
            grid, sites={"min": 3, **sites}, rounds=rounds, **BRIEF, **(options or {})
        )
    return model, history, [json.loads(line) for line in path.read_text().splitlines()]


def of(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] in kinds]


@functools.cache
def reference(rounds: int, asked: bool) -> torch.nn.Module:
    """The simulation in which west has brought nothing: `asked` and left out, or never there."""
    (x, y), sizes = copy.deepcopy(trial.data()), trial.SIZES
    x[sum(sizes[:3]) :] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trial, "data", lambda: (x, y) if asked else (x[: sum(sizes[:3])], y[: sum(sizes[:3])])
        )
        patch.setattr(trial, "SIZES", sizes if asked else sizes[:3])
        return trial.simulate(
            rounds=rounds, **BRIEF, **({"on_bad_update": "skip"} if asked else {})
        )[0]


def finished(events: list[dict[str, Any]], history: dict[str, Any], rounds: int = ROUNDS) -> None:
    """All rounds, with what the honest ones have brought and nothing of west's."""
    assert history["round"] == list(range(rounds))
    assert not any(history["unchanged"])
    assert [event["brought"] for event in of(events, "round_end")] == [HONEST] * rounds
    assert {event["site"] for event in of(events, "update")} == set(HONEST)
    assert events[-1]["kind"] == "end"
    assert events[-1]["reason"] == "finished"
