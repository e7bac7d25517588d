"""Scripts in a folder that all nodes of a Slurm see, and how they are started."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster import machine
from tests.patience import patience

ROOT = Path(__file__).parents[2]
# Most looks are a command of Slurm.
until = functools.partial(machine.until, every=0.1)


class Scripts:
    """A folder that all nodes see (their /tmp is their own), and how a script in it is started."""

    def __init__(self, slurm: Any) -> None:
        self.folder = Path(slurm.folder) / "srun"
        self.folder.mkdir(exist_ok=True)
        self._environ = slurm.environ() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def call(
        self, *words: str, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """stdout and stderr apart, any exit code. It ends before the test's own limit, so that
        what was written is shown."""
        return subprocess.run(
            words,
            env=self._environ | (env or {}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=min(patience(timeout), 250),
        )

    def srun(
        self, options: str, *words: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.call(
            "srun", *options.split(), f"--chdir={self.folder}", sys.executable, *words, env=env
        )

    def alive(self, script: str) -> list[str]:
        """Command lines of processes that run `script`, on all nodes: their process tables are
        parts of this machine's."""
        wanted = str(self.folder / script).encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if wanted in line.split(b"\0") and b"srun" not in line:
                found.append(line.decode())
        return found
