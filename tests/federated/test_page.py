"""The page about federated training: its blocks run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_python")

PAGE = Path(__file__).parents[2] / "docs" / "federated.md"


@pytest.mark.serial
def test_the_blocks_of_the_page_run(tmp_path):
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rsplit("validation accuracy:", 1)[1].split()[0])
    assert 0.5 < accuracy < 1
