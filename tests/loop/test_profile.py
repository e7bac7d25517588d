"""A timeline of some steps: what is written, and where the time is said to go."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allhands import SupervisedRunner, UserError
from allhands.loop.profile import merged, overlap, summary
from tests.runner.problems import arguments


def event(name: str, start: float, end: float, cuda: bool = False) -> Any:
    kind = torch.autograd.DeviceType
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=kind.CUDA if cuda else kind.CPU,
    )


def test_spans() -> None:
    assert merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == [(0.0, 3.0), (5.0, 6.0)]
    assert (
        overlap([(0.0, 4.0), (6.0, 9.0)], [(1.0, 2.0), (3.0, 7.0), (8.0, 20.0)])
        == 1.0 + 1.0 + 1.0 + 1.0
    )
    assert overlap([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0


def test_a_summary_of_two_steps() -> None:
    events = [
        event("data", 0, 1000),
        event("forward", 1000, 3000),
        event("backward", 3000, 7000),
        event("optimizer", 7000, 8000),
        event("aten::mm", 1000, 2000),
        event("gloo:all_reduce", 5000, 7500),
        event("data", 10000, 11000),
        event("forward", 11000, 13000),
        event("backward", 13000, 17000),
        event("optimizer", 17000, 20000),
    ]
    said = [re.sub(" +", " ", line) for line in summary(events, 2)]
    assert said == [
        "profile: 2 steps, 10.000 ms each; of that, on the host of rank 0",
        " data 1.000 ms 10%",
        " forward 2.000 ms 20%",
        " backward 4.000 ms 40%",
        " optimizer 2.000 ms 20%",
        " everything else 1.000 ms 10%",
        " messages between ranks 1.250 ms 12%; 80% of it beside other work",
    ]
    on_gpu = [
        *events,
        event("gemm", 2000, 6000, cuda=True),
        event("ncclDevKernel_AllReduce", 5000, 8000, cuda=True),
    ]
    said = [re.sub(" +", " ", line) for line in summary(on_gpu, 2)]
    assert " the GPU computes 2.000 ms 20%" in said
    assert said[-1] == " messages between ranks 1.500 ms 15%; 33% of it beside other work"


def test_the_trace_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(num_epochs=3, logdir=tmp_path, profile=4, verbose=False)
    plain = arguments(num_epochs=3)
    SupervisedRunner().train(**given)
    SupervisedRunner().train(**plain)
    assert all(
        torch.equal(a, b)
        for a, b in zip(given["model"].parameters(), plain["model"].parameters(), strict=True)
    )
    said = capsys.readouterr().out
    assert "profile: 4 steps," in said
    assert f"profile: written to {tmp_path / 'profile'}, a file a rank" in said
    trace = json.loads((tmp_path / "profile" / "rank-0.json").read_text())
    names = [entry.get("name") for entry in trace["traceEvents"]]
    assert names.count("forward") == names.count("backward") == names.count("optimizer") == 4
    assert 3 <= names.count("data") <= 5


@pytest.mark.serial
def test_two_workers_show_what_is_hidden(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    SupervisedRunner().train(
        **arguments(num_epochs=3, logdir=tmp_path, profile=3, distributed=True, workers=2)
    )
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "rank-0.json",
        "rank-1.json",
    ]
    assert re.search(r"messages between ranks .*% of it beside other work", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"profile": 0},
            r"profile=0; it must be a whole number of optimizer steps, at least 1, or None",
        ),
        (
            {"profile": 3},
            r"profile=3 writes a timeline, which needs a folder; pass logdir=… as well",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        SupervisedRunner().train(**arguments(**options))
