"""What a script cannot tell that runs in a fork of tests/fork_client.py, and what a test can."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_client

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)  # type: ignore[call-overload]


def test_a_script_finds_torch_and_what_it_was_given(tmp_path: Path) -> None:
    text = """
import os, sys
assert "torch._dynamo" in sys.modules
print(sys.argv, os.getcwd(), os.environ["FROM_TEST"], sys.stdin.read(), __name__, __file__)
sys.exit(7)
"""
    (tmp_path / "script.py").write_text(text)
    environ = os.environ | {"FROM_TEST": "yes"}
    done = run("script.py", "a", "b c", cwd=tmp_path, env=environ, input="in")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == (
        f"['script.py', 'a', 'b c'] {tmp_path} yes in __main__ {tmp_path / 'script.py'}\n"
    )


def test_modules_beside_a_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "script.py").write_text("import beside; print(beside.VALUE)")
    assert run(str(tmp_path / "script.py")).stdout == "3\n"
    assert run("-m", "script", cwd=tmp_path).stdout == "3\n"
    assert run("-c", "import beside; print(beside.VALUE)", cwd=tmp_path).stdout == "3\n"
    assert run("-P", "-c", "import beside", cwd=tmp_path).returncode == 1


def test_an_exception_shows_the_users_frames_alone() -> None:
    done = run("-c", "def function():\n    raise ValueError(3)\nfunction()")
    plain = subprocess.run([fork_client.PYTHON, *done.args[1:]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)


def test_signals_reach_the_script_and_its_end_by_one_is_seen() -> None:
    code = "import signal, sys; print(1, flush=True); signal.pause()"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(number)
            assert process.wait() == -number


@pytest.mark.parametrize(
    "words",
    [["-X", "utf8"], ["-P", "-W", "error"]],
)
def test_options_ask_for_a_new_interpreter(words: list[str]) -> None:
    assert run(*words, "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


def test_variables_of_libraries_ask_for_a_new_interpreter() -> None:
    environ = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = run("-c", "import sys; print('torch' in sys.modules)", env=environ)
    assert done.stdout == "False\n"


def test_workers_of_a_job_are_forked_from_it_too(tmp_path: Path) -> None:
    text = "import sys, torch; print('torch._dynamo' in sys.modules, torch.get_num_threads())"
    (tmp_path / "script.py").write_text(text)
    words = [str(Path(sys.executable).with_name("allhands")), "launch", "-n", "2", "script.py"]
    environ = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == ["[0] True 3", "[1] True 3"], done.stderr


def test_what_is_left_running_is_ended_and_told() -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1), os.close(2)
    time.sleep(600)
"""
    assert run("-c", code).returncode == 0
    (line,) = fork_client.left().splitlines()
    assert not Path("/proc", line.split()[0]).exists()
    assert fork_client.left() == ""


def test_others_see_its_variables() -> None:
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    environ = {**os.environ, "FROM_TEST": "seen"}
    seen = []
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"FROM_TEST=seen" in (folder / "environ").read_bytes().split(b"\0"):
                    seen.append(int(folder.name))
        assert process.pid in seen
        assert len(seen) > 1
        process.communicate()


@pytest.mark.parametrize("least", [3, 200, 600])
def test_descriptors_are_inherited(least: int) -> None:
    """Also in a process that has opened many."""
    read, first = os.pipe()
    write = fcntl.fcntl(first, fcntl.F_DUPFD, least)
    os.close(first)
    code = f"import os, sys; os.write({write}, b'torch' if 'torch' in sys.modules else b'new')"
    assert run("-c", code, pass_fds=[write]).returncode == 0
    assert os.read(read, 10) == b"torch"
    os.close(read)
    os.close(write)
