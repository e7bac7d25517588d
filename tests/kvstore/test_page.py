"""The commands that the page about parameter servers shows do what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.pages import run_page

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.usefixtures("forked_python")]


# rare: test_processes.py has such jobs, the examples such scripts.
@pytest.mark.rare
def test_the_page_about_parameter_servers(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert run_page("kvstore.md", tmp_path, {**os.environ, "PATH": path}) == 5
