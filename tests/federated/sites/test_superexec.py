"""The site's superexec: the process of a message is forked, everything else is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from allhands.errors import UserError
from allhands.federated.sites import message_process, superexec
from allhands.launch import processes

pytest.importorskip("flwr")


@pytest.fixture
def executor():
    """With `child()`, the process of a message; this process may have others, of earlier tests."""
    before = set(processes.children(os.getpid()))

    def child() -> int:
        (pid,) = set(processes.children(os.getpid())) - before
        return pid

    module = SimpleNamespace(subprocess=subprocess, child=child)
    superexec.fork_messages(module)
    yield module
    for pid in set(processes.children(os.getpid())) - before:
        os.waitpid(pid, 0)


def test_a_message_is_answered_by_a_fork_and_its_end_is_not_that_of_the_superexec(
    tmp_path: Path, executor, monkeypatch: pytest.MonkeyPatch
):
    from flwr.supercore.exit import exit_handler

    ended: list[str] = []
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [lambda: ended.append("all")])
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    said = tmp_path / "said"

    def answer(arguments: list[str]) -> None:
        handlers = len(exit_handler.registered_exit_handlers)
        kept = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        said.write_text(f"{os.getppid()} {arguments} {handlers} {kept}")
        print("to standard output")
        raise SystemExit(7)

    monkeypatch.setattr(message_process, "main", answer)
    try:
        executor.subprocess.Popen(["flwr-clientapp", "--token", "t"])
        found = os.waitid(os.P_PID, executor.child(), os.WEXITED | os.WNOWAIT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said.read_text() == f"{os.getpid()} ['--token', 't'] 0 True"
    assert found.si_status == 7
    assert (len(exit_handler.registered_exit_handlers), ended) == (1, [])
    # The next task reaps it.
    pid = executor.child()
    executor.subprocess.Popen([sys.executable, "-c", "pass"]).wait()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_what_a_message_raises_is_printed_and_ends_its_process_only(
    executor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def answer(arguments: list[str]) -> None:
        raise ValueError("no such message")

    monkeypatch.setattr(message_process, "main", answer)
    executor.subprocess.Popen(["flwr-clientapp"])
    assert os.waitid(os.P_PID, executor.child(), os.WEXITED | os.WNOWAIT).si_status == 1
    assert "ValueError: no such message" in capfd.readouterr().err


def test_a_message_without_output_has_none(
    executor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(message_process, "main", lambda arguments: os.write(2, b"said"))
    for options, said in (({}, "said"), ({"stdout": subprocess.DEVNULL}, "")):
        executor.subprocess.Popen(["flwr-clientapp"], **options)
        assert os.waitid(os.P_PID, executor.child(), os.WEXITED | os.WNOWAIT).si_status == 0
        assert capfd.readouterr().err == said


def test_other_tasks_are_started_as_flower_does(executor):
    done = executor.subprocess.Popen(
        [sys.executable, "-c", "print(3)"], stdout=subprocess.PIPE, text=True
    )
    assert done.communicate()[0] == "3\n"


def test_a_flower_that_starts_processes_in_another_way_is_refused():
    with pytest.raises(UserError, match="starts no subprocess"):
        superexec.fork_messages(SimpleNamespace())
