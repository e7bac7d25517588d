"""Processes of messages that are forked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from allhands.errors import UserError
from allhands.federated.sites import superexec
from allhands.federated.sites.flower_compat import TASK_LOOP
from tests.patience import patience

SERVER = """
import os, sys, time
from pathlib import Path
from allhands.federated.sites.superexec import ForkServer
folder = Path(sys.argv[1])
def work(arguments):
    (folder / arguments[0]).write_text(f"{os.getpid()} {os.getppid()}")
    if arguments[1] == "fail":
        raise ValueError("it went wrong")
    if arguments[1] == "exit":
        sys.exit(3)
server = ForkServer(work)
print(server.pid, flush=True)
for number, what in enumerate(("work", "fail", "exit", "work")):
    server.start([f"file{number}", what])
sys.stdin.read()
if sys.argv[2] == "close":
    server.close()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for its exit code has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(done: object) -> None:
    deadline = time.monotonic() + patience(20)
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.serial
@pytest.mark.parametrize("end", ["close", "leave", "kill"])
def test_every_request_is_a_process_of_its_own_and_the_server_ends_with_its_maker(tmp_path, end):
    maker = subprocess.Popen(
        [sys.executable, "-c", SERVER, tmp_path, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    server = int(maker.stdout.readline())
    files = [tmp_path / f"file{number}" for number in range(4)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [tuple(map(int, file.read_text().split())) for file in files]
    assert len({pid for pid, _ in pids}) == 4  # the fourth came after one that had failed
    assert {parent for _, parent in pids} == {server}
    until(lambda: all(gone(pid) for pid, _ in pids))
    if end == "kill":
        maker.kill()
    _, said = maker.communicate()
    assert said.count("ValueError: it went wrong") == 1
    until(lambda: gone(server))


def test_exit_codes_are_those_that_python_would_give():
    def leave(code):
        raise SystemExit(code)

    for given, code in ((None, 0), (0, 0), (3, 3), ("a reason", 1)):
        assert superexec._exit_code(lambda _, given=given: leave(given), []) == code
    assert superexec._exit_code(lambda arguments: arguments.append(1), []) == 0


def test_flower_s_executor_asks_the_server_and_starts_nothing_else():
    started = []
    module = SimpleNamespace(subprocess=subprocess)
    superexec.fork_messages(module, SimpleNamespace(start=started.append))
    module.subprocess.Popen(
        ["flwr-clientapp", "--token", "t"], stdout=module.subprocess.DEVNULL, stderr=None
    )
    assert started == [["--token", "t"]]
    with pytest.raises(UserError, match="a site runs no such task: flwr-serverapp"):
        module.subprocess.Popen(["flwr-serverapp"])
    with pytest.raises(UserError, match="does not use subprocess: pip install"):
        superexec.fork_messages(SimpleNamespace(), SimpleNamespace())


def test_flower_s_loop_waits_as_it_is_told():
    loop = pytest.importorskip("flwr.supercore.superexec.run_superexec")
    assert loop.time is time
    module, waits = SimpleNamespace(time=time), []
    TASK_LOOP.set_sleep(module, waits.append)
    module.time.sleep(1.0)
    assert waits == [1.0]
    assert module.time.monotonic is time.monotonic
    with pytest.raises(UserError, match="superexec does not wait by time.sleep"):
        TASK_LOOP.set_sleep(SimpleNamespace(), waits.append)


def test_flower_s_executor_is_the_one_that_is_known(monkeypatch):
    executor = pytest.importorskip("flwr.supercore.superexec.executor.subprocess_executor")
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    started = []
    monkeypatch.setattr(executor, "subprocess", subprocess)
    superexec.fork_messages(executor, SimpleNamespace(start=started.append))
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP,
        runtime_api_address="127.0.0.1:1",
        token="t",
        insecure=True,
        root_certificates_path=None,
        parent_pid=os.getpid(),
        runtime_dependency_install=False,
        suppress_output=True,
        task_id=1,
    )
    executor.SubprocessExecutor().launch(spec)
    ((*asked,),) = started
    assert superexec.message_process.arguments(asked).token == "t"
    assert superexec.message_process.arguments(asked).parent_pid == os.getpid()
