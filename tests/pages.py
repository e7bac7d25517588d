"""Running the commands that a page of the documentation shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
# What differs from one machine to the next.
VARIES = (
    (r"\d+\.\d+\.\d+\.\d+(:\d+)?", "ADDRESS"),
    (r"\(\S+, pid \d+\)", "(HOST, pid N)"),
    (r"\bon host \S+", "on host HOST"),
    (r"\brank (\d+) \(\S+\):", r"rank \1 (HOST):"),
    (r'File "\S*/', 'File "'),
    (r"rsync \S+/ ->", "rsync FOLDER/ ->"),
    (r"\bjob \d+", "job N"),
    (r"slurm-\d+\.out", "slurm-N.out"),
    (r"\b\d+\.\d+ s\b", "N s"),
)


def plain(line: str) -> str:
    for pattern, name in VARIES:
        line = re.sub(pattern, name, line)
    return line.rstrip()


def run_page(name: str, folder: Path, environ: dict[str, str]) -> int:
    """Write the files that a page shows, run its commands in order, and compare what they print;
    how many there were.

    Every line that is shown must be printed, in any order, since processes share one screen. Three
    dots stand for more lines.
    """
    text = (DOCS / name).read_text()
    for title, body in re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL
    ):
        (folder / title).write_text(body)
        (folder / title).chmod(0o755)
    commands = 0
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            printed = [plain(line) for line in done.stdout.splitlines()]
            missing = [
                line
                for line in shown.splitlines()
                if line.strip() not in ("", "...") and plain(line) not in printed
            ]
            assert not missing, f"{name}: `{command}` did not print {missing}, but:\n{done.stdout}"
            assert "echo $?" in command or done.returncode == 0, (
                f"{name}: `{command}`: {done.returncode}\n{done.stdout}"
            )
            commands += 1
    return commands
