"""Signals and times on which the ranks agree; more ranks in tests/faults."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import allhands
from allhands import Callback
from allhands.loop.agreement import Agreement
from allhands.world import World
from tests.runner.problems import StopAt, fit


@pytest.fixture
def world() -> Any:
    yield allhands.init(device="cpu")
    allhands.finalize()


def test_a_signal_is_heeded_at_the_next_step_when_there_is_nobody_to_ask(world: World) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Agreement(world, None) as agreement:
        agreement.begin(10)
        agreement.ask(11)
        assert agreement.next > 11
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreement.next <= 12
        assert agreement.ask(12).signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_rounds_come_a_few_times_a_second_whatever_a_step_takes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, expected in ((0.001, 250), (0.1, 2), (3.0, 1)):
        now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now)  # noqa: B023
        agreement = Agreement(world, None)
        agreement.begin(0)
        step = 0
        for _ in range(20):
            step = int(agreement.next)
            now = 100.0 + step * seconds
            agreement.ask(step)
        assert agreement.next - step == pytest.approx(expected, abs=1)


def test_a_worker_that_waits_is_asked_for_again_before_the_next_step(world: World) -> None:
    told = SimpleNamespace(changed=lambda: False, job_ends=lambda: False)
    agreement = Agreement(world, None, elastic=cast(Any, told))
    agreement.begin(0)
    for step in range(1, 200):
        if step >= agreement.next:
            agreement.ask(step)
    assert agreement.next > 250, "steps that take no time are asked about seldom"
    told.changed = lambda: True
    # Such as a fast step of an evaluation, in which nobody is taken in.
    assert agreement.ask(256).changed
    assert agreement.next == 257


def test_a_checkpoint_is_due_after_its_time_and_not_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    agreement = Agreement(world, 60.0, ())
    now = 59.0
    assert not agreement.ask(1).save
    now = 61.0
    assert agreement.ask(2).save
    agreement.saved()
    now = 100.0
    assert not agreement.ask(3).save


def test_nothing_to_agree_on_costs_nothing(world: World) -> None:
    assert Agreement(world, None, ()).next == math.inf


def test_a_handler_of_the_users_own_stays(tmp_path: Path) -> None:
    heard: list[int] = []

    class Kill(Callback):
        def on_step_end(self, training: Any) -> None:
            if training.step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        _, history = fit(logdir=tmp_path, num_epochs=1, callbacks=[Kill()])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert history["epoch"] == [1]


class Send(Callback):
    def __init__(self, where: str, number: int) -> None:
        self.where, self.number = where, number

    def on_step_end(self, training: Any) -> None:
        if self.where == "step" and training.step == 4:
            os.kill(os.getpid(), self.number)

    def on_epoch_end(self, training: Any) -> None:
        if self.where == "epoch" and training.epoch == 2:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("where", "number", "said"),
    [
        ("step", signal.SIGTERM, "stopped by SIGTERM after optimizer step 4, in epoch 1"),
        ("step", signal.SIGUSR1, "stopped by SIGUSR1 after optimizer step 4, in epoch 1"),
        ("epoch", signal.SIGTERM, "stopped by SIGTERM after epoch 2"),
    ],
)
def test_a_signal_saves_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, number: int, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(logdir=tmp_path, callbacks=[Send(where, number)])
    assert ended.value.code == 128 + number
    assert f"{said}: saved in {tmp_path}; go on with resume='auto'" in capsys.readouterr().out
    state = allhands.load_checkpoint(tmp_path)
    assert state["step"] == (4 if where == "step" else 14)
    assert signal.getsignal(number) == signal.SIG_DFL
    _, history = fit(logdir=tmp_path, callbacks=[Callback()], resume="auto")
    assert history["epoch"] == [1, 2, 3]


def test_without_a_logdir_a_signal_ends_the_process_as_always() -> None:
    code = (
        "import os, signal\nfrom tests.loop.test_agreement import Send\nfrom "
        "tests.runner.problems import fit\n"
        "fit(callbacks=[Send('step', signal.SIGTERM)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -signal.SIGTERM


def test_a_stop_within_the_epoch_saves_and_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, history = fit(logdir=tmp_path, callbacks=[StopAt(9)])
    assert history["epoch"] == [1]
    assert "stopped after optimizer step 9, in epoch 2: enough" in capsys.readouterr().out
    whole, _ = fit()
    resumed, history = fit(logdir=tmp_path, callbacks=[Callback()], resume="auto")
    assert history["step"] == [7, 14, 21]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
