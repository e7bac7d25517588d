"""`allhands join`: workers that are added to an elastic job while it runs, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allhands.errors import UserError
from allhands.launch.join_client import address_of
from tests.patience import patience

from .conftest import Job, wait_until
from .elastic_jobs import SCRIPT, alone, assert_same, result

# Steps are slow until a third worker takes part.
GROWS = SCRIPT.replace("epochs(3)", "epochs(40)").replace(
    "time.sleep(pause)", "time.sleep(pause if loop.world.world_size < 3 else 0)"
)


def join(folder: Path, *words: str, **extra: str) -> tuple[int, str]:
    """Exit code and standard error of `allhands join`."""
    program = "from allhands.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "join", *words],
        cwd=folder,
        env=os.environ | extra,
        timeout=patience(120),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def started(job: Job, script: str) -> tuple[subprocess.Popen[bytes], str, str]:
    """A job of two workers that a third one may join, where that asks, and the token's file."""
    job.script(script)
    words = ("--elastic", "--max-workers", "3", "--log-dir", "told", "script.py", "6", "0.5")
    process = job.start("-n", "2", *words)
    told = job.folder / "told" / "join.txt"
    assert wait_until(lambda: told.exists() and told.read_text().endswith("\n"), 30)
    _, _, address, _, file, *_ = told.read_text().split()
    return process, address, file


@pytest.mark.serial
@pytest.mark.usefixtures("forked_python")
def test_workers_join_a_job_that_runs_and_others_are_refused_by_name(job: Job) -> None:
    process, address, file = started(job, GROWS)
    elsewhere = job.folder / "elsewhere"
    elsewhere.mkdir()
    for name in (job.folder / "script.py", Path(file)):
        shutil.copy(name, elsewhere)
    key = elsewhere / "join.token"
    assert key.stat().st_mode & 0o777 == 0o600
    words = (address, "--token-file", "join.token", "-n")
    code, said = join(elsewhere, *words, "2")
    assert code == 2
    assert "the job has 2 workers, and 2 more would be over --max-workers 3" in said
    found = elsewhere / "old" / "allhands-0.0.1.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: allhands\nVersion: 0.0.1\n")
    code, said = join(elsewhere, *words, "1", PYTHONPATH=str(found.parent))
    assert code == 2
    assert "it has allhands 0.0.1, and the launcher has " in said
    (elsewhere / "wrong.token").write_text("0" * 64)
    code, said = join(elsewhere, address, "--token-file", "wrong.token", "-n", "1")
    assert code == 2
    assert "others than its owner may read it" in said
    (elsewhere / "wrong.token").chmod(0o600)
    code, said = join(elsewhere, address, "--token-file", "wrong.token", "-n", "1")
    assert code == 2
    assert f"the job at {address} refuses this host: it has another token" in said
    code, said = join(elsewhere, *words, "1")
    assert code == 0, said
    assert "the job has let go of this host" in said
    out, err = (data.decode() for data in process.communicate(timeout=patience(120)))
    assert process.returncode == 0, out + err
    assert f"allhands join {address} --token-file {file} -n 1" in err
    assert "joins with rank 2" in err
    assert "membership 1: 1 worker joined; 3 workers go on" in out
    ended = result(job.folder)
    assert ended[3] == 3
    assert_same(ended, alone(job.folder / "alone", GROWS, 12))
    assert not Path(file).exists()
    code, said = join(elsewhere, *words, "1")
    assert code == 2
    assert f"no job answers at {address}" in said


@pytest.mark.serial
@pytest.mark.usefixtures("forked_python")
def test_one_that_joins_with_another_script_ends_alone(job: Job) -> None:
    script = GROWS.replace("size < 3", 'size < 3 and not os.path.exists("refused")')
    process, address, file = started(job, script)
    other = job.script(f"{script}\n# another\n", "elsewhere/script.py")
    code, said = join(job.folder / "elsewhere", address, "--token-file", file, "-n", "1")
    (job.folder / "refused").touch()
    out, err = (data.decode() for data in process.communicate(timeout=patience(120)))
    assert process.returncode == 0, out + err
    why = f"this worker cannot take part: its {other} is another version than the script"
    assert why in err
    assert code == 2
    assert "the job lets go of this host: rank 2: raised " in said
    assert why in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("d1:80", ("d1", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::2]:9", ("fd00::2", 9)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert address_of(text) == found


@pytest.mark.parametrize("text", ["d1", ":80", "d1:", "d1:0", "d1:70000", "d1:http"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no address; write HOST:PORT"):
        address_of(text)
