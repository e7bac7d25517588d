"""`allhands launch` takes its own options before the script and leaves the script's alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allhands.cli import launch as cli
from allhands.cli import main
from allhands.errors import UserError
from allhands.launch import Command
from allhands.launch.hosts import HostSpec
from allhands.launch.options import Options


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "plain").write_text("")
    (tmp_path / "prog").write_text("#!/bin/sh\n")
    (tmp_path / "prog").chmod(0o755)
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text("")
    (tmp_path / "with space.py").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


@dataclass
class Launched:
    """A job as the command line ordered it."""

    command: Command
    hosts: list[Any]
    options: Options
    slots: Any


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    calls: list[Launched] = []

    def record(command: Command, hosts: list[Any], options: Options, slots: Any = None) -> int:
        calls.append(Launched(command, hosts, options, slots))
        return 7

    monkeypatch.setattr(cli, "run_job", record)
    return calls


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py"], Command("script", "train.py")),
        (
            ["train.py", "-n", "9", "-h", "--grace", "x"],
            Command("script", "train.py", ("-n", "9", "-h", "--grace", "x")),
        ),
        (["train.py", "--", "-x"], Command("script", "train.py", ("--", "-x"))),
        (["--", "train.py", "-n"], Command("script", "train.py", ("-n",))),
        (["with space.py", "a b", ""], Command("script", "with space.py", ("a b", ""))),
        (["-m", "pkg.mod", "-m", "--flag"], Command("module", "pkg.mod", ("-m", "--flag"))),
        (["app", "x"], Command("script", "app", ("x",))),
        (["plain", "x"], Command("script", "plain", ("x",))),
        (["--", "./prog", "-v"], Command("program", "./prog", ("-v",))),
    ],
)
def test_everything_after_the_script_is_the_scripts(
    words: list[str], command: Command, folder: Path, launched: list[Launched]
) -> None:
    assert main.run(["launch", "-n", "3", *words]) == 7
    assert (launched[0].command, launched[0].options.workers) == (command, 3)


def test_a_whole_command_in_quotes(folder: Path, launched: list[Launched]) -> None:
    main.run(["launch", "-n", "2", "sh -c 'echo $RANK' 'a b'"])
    command = launched[0].command
    assert (command.kind, Path(command.target).name, command.args) == (
        "program",
        "sh",
        ("-c", "echo $RANK", "a b"),
    )


def test_options_arrive(folder: Path, launched: list[Launched]) -> None:
    words = (
        "-n 2 --log-dir logs --grace 1.5 --heartbeat-timeout 9 --threads 3 --no-preload "
        "--no-prefix train.py"
    )
    main.run(["launch", *words.split()])
    assert launched[0].options == Options(
        workers=2,
        log_dir=Path("logs"),
        grace=1.5,
        heartbeat_timeout=9.0,
        threads=3,
        preload=False,
        prefix=False,
    )


def test_options_of_other_hosts_arrive(
    folder: Path, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "a b\"c'")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (folder / "hosts").write_text("# ours\nd1 slots=2\n\nme@d2:2222  # the other\n")
    words = (
        "-n 2 -s 1 -H hosts --sync-dst-dir /srv/job --exclude *.pt --env TOKEN --env X=1=2 "
        "--max-restarts 3 --min-workers 1"
    )
    words += " --server-restarts 2 --on-worker-failure continue"
    main.run(
        [
            "launch",
            *words.split(),
            "--host-timeout",
            "9",
            "--rejoin-timeout",
            "4",
            "python /srv/job/absent.py 'a b'",
        ]
    )
    (job,) = launched
    assert job.command == Command("program", "python", ("/srv/job/absent.py", "a b"))
    assert job.options == Options(
        workers=2,
        servers=1,
        cwd="/srv/job",
        max_restarts=3,
        min_workers=1,
        host_timeout=9.0,
        rejoin_timeout=4.0,
        server_restarts=2,
        on_worker_failure="continue",
    )
    assert [host.spec for host in job.hosts] == [
        HostSpec("d1", slots=2),
        HostSpec("d2", "me", 2222),
    ]
    assert job.slots == [2, None]
    assert job.hosts[0]._copy == (str(folder), "/srv/job", ["*.pt"])
    variables = job.hosts[1]._env
    assert (variables["TOKEN"], variables["X"], variables["NCCL_DEBUG"]) == (
        "a b\"c'",
        "1=2",
        "INFO",
    )
    assert not {"HOME", "PATH", "CUDA_VISIBLE_DEVICES", "ALLHANDS_LAUNCH"} & variables.keys()


@pytest.mark.parametrize(
    "words", ["--min-workers 2 --max-workers 8", "--min 2 --max 8", "--min=2 --max=8"]
)
def test_how_many_workers_an_elastic_job_may_have(
    folder: Path, launched: list[Launched], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    main.run(["launch", "-n", "3", "--elastic", *words.split(), "--env", "A=1", "train.py"])
    options = launched[0].options
    assert (options.workers, options.min_workers, options.max_workers) == (3, 2, 8)
    assert options.env_joined["NCCL_DEBUG"] == "INFO"
    assert options.env_joined["A"] == "1"


def test_the_names_of_mxnets_launcher(
    folder: Path, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED", "7")
    (folder / "hosts").write_text("d1\nd2\n")
    words = (
        "--num-workers 2 --num-servers 1 --hostfile hosts --env-worker LR:0.1 --env-worker A=b:c"
    )
    words += " --env-server OMP_NUM_THREADS:3 --env-server SHARED train.py"
    main.run(["launch", *words.split()])
    (job,) = launched
    assert (job.options.workers, job.options.servers) == (2, 1)
    assert [host.spec.name for host in job.hosts] == ["d1", "d2"]
    assert job.options.env_worker == {"LR": "0.1", "A": "b:c"}
    assert job.options.env_server == {"OMP_NUM_THREADS": "3", "SHARED": "7"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 1 --env-server A=1 train.py", "env_server (--env-server A) is for parameter servers"),
        ("-n 1 --env-worker 1X:2 train.py", "write --env-worker NAME or --env-worker NAME=VALUE"),
        ("--launcher ssh train.py", "needs the hosts"),
        (
            "-H d1 --launcher local train.py",
            "--hosts is for --launcher ssh or --launcher mpi, and the launcher here is local",
        ),
        (
            "--sync-dst-dir /x train.py",
            "--sync-dst-dir is for --launcher ssh, and the launcher here is local",
        ),
        (
            "--python /usr/bin/python train.py",
            "--python is for --launcher ssh or --launcher slurm or --launcher mpi",
        ),
        ("-H d1 --env 1X=2 train.py", "is no name of a variable"),
        ("-H d1 --env ABSENT_HERE train.py", "it is not set here"),
        ("-H ./absent/hosts train.py", "there is no such file"),
        ("-n 1 --launcher sssh train.py", "sssh"),
    ],
)
def test_options_that_do_not_go_together(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["launch", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["trian.py"],
            "there is no script 'trian.py' (looked in the working folder); did you mean "
            "'train.py'?",
        ),
        (["nowhere/x.py"], "there is no script 'nowhere/x.py': there is no folder 'nowhere'"),
        (["no-such-program"], "there is no script or program 'no-such-program'"),
        (["empty"], "'empty' is a folder without a __main__.py"),
        (["-n", "0", "train.py"], "--workers 0: it must be at least 1"),
        (["--grace", "-1", "train.py"], "grace=-1.0: it must be 0 or more seconds"),
        (["--threads", "0", "train.py"], "threads=0: it must be at least 1"),
    ],
)
def test_mistakes(
    words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["launch", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("allhands: error: ")
    assert text in err


def test_a_folder_is_named_in_the_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean 'app/__main__\.py'"):
        cli.parse(["app/_main_.py"])


@pytest.mark.parametrize(
    ("visible", "listed", "expected"),
    [
        (None, "GPU 0: A (UUID: x)\nGPU 1: A (UUID: y)\n", 2),
        ("0,2,3", "", 3),
        ("", "GPU 0: A\n", 5),
        ("-1", "GPU 0: A\n", 5),
        (None, None, 5),
        (None, "No devices were found\n", 5),
    ],
)
def test_one_worker_a_gpu_or_a_core(
    visible: str | None,
    listed: str | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if listed is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cli, "cores", lambda: 5)
    assert cli.default_workers() == expected
