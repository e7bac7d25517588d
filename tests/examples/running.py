"""Runs an example as a user would, in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def example_module(name: str) -> ModuleType:
    """The example, such as "own_loop/sam", as a module of its own."""
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_in(folder: Path, *command: str, env: dict[str, str] | None = None) -> str:
    """What the command printed; fails with it unless the exit code is 0.

    The limit is the test's own: machines that run tests are often busy.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_example(folder: Path, name: str, *args: str, env: dict[str, str] | None = None) -> str:
    """``python examples/name args…``, run in `folder`."""
    return run_in(folder, sys.executable, str(EXAMPLES / name), *args, env=env)


def epochs_in(text: str) -> list[str]:
    """The first column of the table of epochs, such as ``["1/8", "2/8"]``."""
    return re.findall(r"^(?:\[\d+\] )?\s+(\d+/\d+)\s", text, flags=re.MULTILINE)


def program(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).parent / name)
