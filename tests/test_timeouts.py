"""A test that hangs fails alone, with its stacks shown and its processes ended, and the run goes on
to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.launch.conftest import MARKER, alive, wait_until

pytestmark = [pytest.mark.serial, pytest.mark.timeout(400)]

CONFTEST = """
from tests import timeouts
from tests.conftest import *

timeouts.LAST = 4.0
"""
# The name of each test is where its stack is to be seen.
HANGS = {
    "test_python.py": """
import time

def test_before():
    pass

def test_hangs_in_python():
    while True:
        time.sleep(0.1)

def test_after():
    pass
""",
    "test_native.py": """
import ctypes, os, threading, time

def test_before():
    pass

def test_hangs_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_hangs_in_waitpid():
    child = os.fork()  # holds all descriptors of this process, the connection to xdist included
    while not child:
        time.sleep(1)
    os.waitpid(child, 0)

def test_hangs_with_the_interpreters_lock():
    ctypes.PyDLL(None).pause()

def test_after():
    pass
""",
    "child.py": """
import signal, time

def hangs_in_a_child():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(1000)

hangs_in_a_child()
""",
    "test_children.py": """
import subprocess, sys

def start(**more):
    child = subprocess.Popen(
        [sys.executable, "child.py"], stdout=subprocess.PIPE, start_new_session=True, **more)
    child.stdout.readline()
    return child

def test_hangs_with_a_child():
    start().wait()

def test_hangs_with_a_child_that_it_listens_to():
    start(stderr=subprocess.PIPE).wait()

def test_after():
    pass
""",
}
NAMES = re.findall(r"def (test_hangs\w+)", "".join(HANGS.values()))


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    for name, text in {**HANGS, "conftest.py": CONFTEST}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *words: str, mark: str) -> tuple[int, str]:
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rf",
            "--timeout",
            "4",
            *words,
            ".",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, MARKER: mark, "PYTEST_ADDOPTS": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
    )
    return done.returncode, done.stdout


# rare under worksteal: the processes are the same, and end in the same way.
@pytest.mark.parametrize("way", ["loadfile", pytest.param("worksteal", marks=pytest.mark.rare)])
def test_only_the_tests_that_hang_fail(hangs: Path, way: str) -> None:
    mark = uuid.uuid4().hex
    code, said = run(hangs, "-n", "2", "--dist", way, mark=mark)
    assert code == 1, said
    assert f"{len(NAMES)} failed, 5 passed" in said, said
    assert sorted(re.findall(r"^FAILED .*::(\w+)", said, re.MULTILINE)) == sorted(NAMES)
    for name in NAMES:
        assert re.search(rf"in {name}$", said, re.MULTILINE), f"no stack of {name} in:\n{said}"
    assert said.count("in hangs_in_a_child") >= 2, said
    assert wait_until(lambda: not alive(mark), 10), alive(mark)


def test_without_xdist(hangs: Path) -> None:
    mark = uuid.uuid4().hex
    code, said = run(hangs, "-k", "not interpreters_lock", mark=mark)
    assert code == 1, said
    assert f"{len(NAMES) - 1} failed, 5 passed" in said, said
    assert said.count("in hangs_in_a_child") >= 2, said
    assert wait_until(lambda: not alive(mark), 10), alive(mark)
