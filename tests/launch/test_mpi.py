"""`--launcher mpi` speaks the words of the MPI launcher that is here."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from allhands.cli import main
from allhands.errors import UserError
from allhands.launch import Command, mpi
from allhands.launch.hosts import HostSpec
from allhands.launch.mpi import RANK, MpiLauncher, command_line, find_launcher
from allhands.launch.options import Options
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

OPEN_MPI, MPICH = MpiLauncher("mpirun", "openmpi"), MpiLauncher("mpiexec", "mpich")
SCRIPT = Command("script", "train.py", ("--lr", "0.1"))
D1, D2 = HostSpec("d1", slots=2), HostSpec("d2", slots=2)


@pytest.mark.parametrize(
    ("launcher", "given", "expected"),
    [
        (OPEN_MPI, {}, "mpirun -n 4 --host localhost:4 --tag-output"),
        (
            OPEN_MPI,
            {"hosts": [D1, D2], "workers": 3, "exported": ["A", "B"]},
            "mpirun -n 3 --host d1:2,d2:1 --tag-output -x A -x B",
        ),
        (
            OPEN_MPI,
            {"hosts": [D1, D2], "workers": None, "prefix": False},
            "mpirun -n 4 --host d1:2,d2:2",
        ),
        (
            OPEN_MPI,
            {"hosts": [D1, D2], "workers": 2, "options": ["--bind-to", "none"]},
            "mpirun -n 2 --host d1:2 --tag-output --bind-to none",
        ),
        (MPICH, {"exported": ["A"]}, "mpiexec -n 4 -prepend-rank"),
        (
            MPICH,
            {"hosts": [HostSpec("d1"), HostSpec("d2")], "prefix": False},
            "mpiexec -n 4 -hosts d1:2,d2:2",
        ),
    ],
)
def test_the_words(launcher: MpiLauncher, given: dict[str, Any], expected: str) -> None:
    chosen = {"workers": 4, "hosts": [], "exported": [], "python": "py", "prefix": True} | given
    assert command_line(launcher, SCRIPT, **chosen) == [
        *expected.split(),
        "py",
        "-m",
        RANK,
        "script",
        "train.py",
        "--lr",
        "0.1",
    ]


def test_modules_and_programs() -> None:
    given: dict[str, Any] = {
        "workers": 1,
        "hosts": [],
        "exported": [],
        "python": "py",
        "prefix": False,
    }
    assert command_line(MPICH, Command("module", "pkg.mod", ("x",)), **given)[-6:] == [
        "py",
        "-m",
        RANK,
        "module",
        "pkg.mod",
        "x",
    ]
    assert command_line(MPICH, Command("program", "prog", ("x",)), **given)[-2:] == ["prog", "x"]
    python = Command("program", sys.executable, ("train.py", "x"))
    assert command_line(MPICH, python, **given)[-3:] == ["script", "train.py", "x"]


def test_what_cannot_be_said_in_these_words_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"exported": [], "python": "py", "prefix": True}
    with pytest.raises(UserError, match="d1 has a user or port in --hosts"):
        command_line(MPICH, SCRIPT, workers=2, hosts=[HostSpec("d1", user="me")], **given)
    with pytest.raises(UserError, match="nobody said how many ranks"):
        command_line(MPICH, SCRIPT, workers=None, hosts=[HostSpec("d1")], **given)
    with pytest.raises(UserError, match="there is no mpirun or mpiexec in PATH"):
        find_launcher({"PATH": str(tmp_path)})
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho something else\n")
    other.chmod(0o755)
    with pytest.raises(UserError, match="is neither Open MPI's nor MPICH's"):
        find_launcher({"PATH": str(tmp_path)})


def test_options_of_other_launchers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--launcher mpi -n 2 -s 1 --no-preload --max-restarts 2 train.py"
    assert main.run(["launch", *words.split()]) == 2
    assert "--max-restarts, --no-preload: with --launcher mpi" in capsys.readouterr().err


def test_the_ranks_of_a_job_share_a_secret_that_no_command_line_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    fake = tmp_path / "mpirun"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Open MPI" && exit\n'
        f'echo "$ALLHANDS_TOKEN $*" >> {seen}\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("ALLHANDS_TOKEN", raising=False)
    words = ["launch", "--launcher", "mpi", "-n", "2", "train.py"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main.run(words) == 0
    assert main.run(words) == 0
    monkeypatch.setenv("ALLHANDS_TOKEN", "mine")
    assert main.run(words) == 0
    (first, *one), (second, *_), (third, *_) = map(str.split, seen.read_text().splitlines())
    assert third == "mine"
    assert first != second
    assert len(first) == len(second) == 64
    assert first not in " ".join(one)
    assert "-x ALLHANDS_TOKEN" in " ".join(one)


NOTES = """
import sys
import torch
import torch.distributed as dist

assert "allhands" not in vars()
dist.init_process_group(backend="mpi")
own = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(own)
print(f"sum {own.item()} {sys.argv[1:]} {__name__} {sys.path[0]}\\n", end="")
if "fail" in sys.argv:
    raise ValueError("mine")
"""


def under_mpi(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`allhands launch --launcher mpi -n 2` in a folder; skips the test where there is no MPI."""
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        pytest.skip("no MPI here: pip install mpi4py mpich")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = str(Path(sys.executable).with_name("allhands"))
    return subprocess.run(
        [program, "launch", "--launcher", "mpi", "-n", "2", *words],
        cwd=folder,
        env={**os.environ, **root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )


@pytest.mark.serial
@pytest.mark.parametrize("words", [["notes.py"], ["-m", "notes"]])
def test_a_script_without_an_import_of_allhands(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    done = under_mpi(tmp_path, *words, "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 3.0 ['--lr', '1'] __main__ {tmp_path}") == 2


# rare with -m: the module is run in the test above, and its failure is told as that of a script.
@pytest.mark.serial
@pytest.mark.parametrize(
    "words", [["notes.py"], pytest.param(["-m", "notes"], marks=pytest.mark.rare)]
)
def test_such_a_script_fails(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    failed = under_mpi(tmp_path, *words, "fail")
    assert failed.returncode != 0
    assert "ValueError: mine" in failed.stderr
    assert "mpi_rank.py" not in failed.stderr.partition("\n")[2]


# A store with a server adds up what both workers push; torch.distributed works beside it.
STORE = """
import os, signal, time
import torch
import torch.distributed as dist
import allhands
from allhands import kvstore as kv

store = kv.create("dist")
store.init("a", torch.zeros(3))
store.push("a", torch.full((3,), store.rank + 1.0))
got = torch.zeros(3)
store.pull("a", out=got)
allhands.init()
own = torch.ones(1)
dist.all_reduce(own)
said = f"{type(store).__name__} {got.tolist()} {own.item()} {os.environ.get('ONE')}"
print(f"{said} {os.environ['KEPT']}\\n", end="")
"""


@pytest.mark.serial
def test_servers_beside_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(STORE)
    words = ["-s", "1", "--env-server", "ONE=1", "--env-worker", "KEPT=yes", "store.py"]
    done = under_mpi(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ServedStore [3.0, 3.0, 3.0] 2.0 None yes") == 2
    refused = under_mpi(tmp_path, "-s", "1", "--", "sh", "-c", "true")
    assert "sh is no Python script, which alone is told where the servers are" in refused.stderr


# The server of a job is the child of the launcher that has the job's secret.
LOSES = """
import os, signal, time
from pathlib import Path
import torch
from allhands import kvstore as kv

store = kv.create("dist")
store.init("a", torch.zeros(3))
if store.rank == 0:
    secret = os.environ["ALLHANDS_TOKEN"].encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (process / "cmdline", process / "environ")
            if b"allhands.kvstore.parameter_server" in words.read_bytes():
                if secret in variables.read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            pass
time.sleep(60)
"""


@pytest.mark.serial
def test_a_server_that_dies_ends_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES)
    done = under_mpi(tmp_path, "-s", "1", "loses.py")
    assert done.returncode != 0
    assert "server 0 ended with exit code -9; the ranks are ended" in done.stderr


def test_nothing_is_left_open_when_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_launcher", lambda _: MpiLauncher("true", "mpich"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        assert started(servers=0) == 0
        with pytest.raises(UserError, match="sh is no Python script"):
            started(servers=1)
        gc.collect()
    assert [str(one.message) for one in caught] == []


def started(servers: int) -> int:
    return mpi.run_mpi(
        Command("program", "sh", ()),
        [],
        Options(workers=1, servers=servers),
        variables={},
        exported=[],
        python=sys.executable,
        more=[],
    )
