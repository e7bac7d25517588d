"""Signals for a process that has called `spawn`: its workers get them, and leave or go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from allhands.errors import WorkerError
from allhands.launch import spawn, worker
from tests.patience import patience

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("shared_agent")]


def saves(handled: bool) -> str:
    """Leave after SIGTERM or SIGUSR1, half a second later; tell when SIGUSR2 comes."""
    got: list[int] = []
    if handled:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: got.append(number))
    worker.send({"up": int(os.environ["RANK"])})
    deadline = time.monotonic() + patience(20)
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    if got != [signal.SIGUSR2]:
        sys.exit(128 + got[0])
    return "noted"


def spawn_and_signal(number: int, handled: bool = True) -> list[Any]:
    """The caller gets a signal, from outside, when both workers are up."""
    up: list[int] = []

    def hear(rank: int, message: Any) -> None:
        up.append(rank)
        if len(up) == 2:
            os.kill(os.getpid(), number)

    return spawn(saves, (handled,), workers=2, on_message=hear)


@pytest.fixture
def _defaults() -> Any:
    """The handlers of a process that handles no signal, checked to be back in the end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    now = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert now == dict.fromkeys(numbers, signal.SIG_DFL)


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_caller_leaves_when_its_workers_did(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as raised:
        spawn_and_signal(number)
    assert raised.value.code == 128 + number


@pytest.mark.usefixtures("_defaults")
def test_the_caller_goes_on_when_its_workers_do() -> None:
    assert spawn_and_signal(signal.SIGUSR2) == ["noted", "noted"]


@pytest.mark.usefixtures("_defaults")
def test_workers_that_do_not_handle_a_signal_die_of_it() -> None:
    with pytest.raises(WorkerError, match="failed first: killed by SIGTERM") as raised:
        spawn_and_signal(signal.SIGTERM, handled=False)
    assert raised.value.exit_code == 143


def test_a_handler_of_the_callers_own_is_left_in_place() -> None:
    got: list[int] = []

    def own(number: int, _frame: Any) -> None:
        got.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        results = spawn(
            lambda: [worker.send({}), time.sleep(0.6)] and "untouched",
            workers=1,
            on_message=lambda *_: os.kill(os.getpid(), signal.SIGUSR1),
        )
        assert (results, got, signal.getsignal(signal.SIGUSR1)) == (
            ["untouched"],
            [signal.SIGUSR1],
            own,
        )
    finally:
        signal.signal(signal.SIGUSR1, before)


class Slow:
    """Tells the caller when it arrives in a worker, and never does."""

    def __reduce__(self) -> Any:
        return arrive, ()


def arrive() -> None:
    worker.send({"arriving": True})
    time.sleep(60)


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.rare),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.rare),
    ],
)
def test_a_signal_before_the_function_is_called_ends_the_caller(number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as raised:
        spawn(print, (Slow(),), workers=2, on_message=lambda *_: os.kill(os.getpid(), number))
    assert raised.value.code == 128 + number


def fails_while_another_stops() -> None:
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, lambda *_: worker.send({"stopping": True}) and sys.exit(0))
        Path("up").touch()
        time.sleep(60)
    while not Path("up").exists():
        time.sleep(0.02)
    raise OSError("disk is full")


@pytest.mark.usefixtures("_defaults")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.rare), signal.SIGUSR1]
)
def test_a_signal_while_workers_are_stopped_is_for_the_caller(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Who catches the failure must not go on as if no signal had come."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        spawn(
            fails_while_another_stops, workers=2, on_message=lambda *_: os.kill(os.getpid(), number)
        )
    assert raised.value.code == 128 + number
    assert "rank 0" in (said := capfd.readouterr().err)
    assert "disk is full" in said
