"""The commands that the page about this machine's workers shows do what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.pages import run_page

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.usefixtures("forked_python")]


# rare: the tests beside this one have its commands.
@pytest.mark.rare
@pytest.mark.usefixtures("mark")
def test_the_page_about_launching(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert run_page("launching.md", tmp_path, {**os.environ, "PATH": path}) == 5
