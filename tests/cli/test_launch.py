"""`allhands launch` takes its own options before the script and leaves the script's alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allhands.cli import launch as cli
from allhands.cli import main
from allhands.errors import UserError
from allhands.launch import Command


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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Command, int, dict[str, Any]]]:
    calls: list[tuple[Command, int, dict[str, Any]]] = []

    def record(command: Command, workers: int, **options: Any) -> int:
        calls.append((command, workers, options))
        return 7

    monkeypatch.setattr(cli, "launch_local", record)
    return calls


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py"], Command("script", "train.py")),
        (["train.py", "-n", "9", "-h", "--grace", "x"], Command("script", "train.py", ("-n", "9", "-h", "--grace", "x"))),
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
    words: list[str], command: Command, folder: Path, launched: list[Any]
) -> None:
    assert main.run(["launch", "-n", "3", *words]) == 7
    assert launched[0][:2] == (command, 3)


def test_a_whole_command_in_quotes(folder: Path, launched: list[Any]) -> None:
    main.run(["launch", "-n", "2", "sh -c 'echo $RANK' 'a b'"])
    command = launched[0][0]
    assert (command.kind, Path(command.target).name, command.args) == ("program", "sh", ("-c", "echo $RANK", "a b"))


def test_options_arrive(folder: Path, launched: list[Any]) -> None:
    words = "-n 2 --log-dir logs --grace 1.5 --heartbeat-timeout 9 --threads 3 --no-preload --no-prefix train.py"
    main.run(["launch", *words.split()])
    assert launched[0][2] == {
        "log_dir": Path("logs"),
        "grace": 1.5,
        "heartbeat_timeout": 9.0,
        "threads": 3,
        "preload": False,
        "prefix": False,
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian.py"], "there is no script 'trian.py' (looked in the working folder); did you mean 'train.py'?"),
        (["nowhere/x.py"], "there is no script 'nowhere/x.py': there is no folder 'nowhere'"),
        (["no-such-program"], "there is no script or program 'no-such-program'"),
        (["empty"], "'empty' is a folder without a __main__.py"),
        (["-n", "0", "train.py"], "--workers 0: it must be at least 1"),
        (["--grace", "-1", "train.py"], "grace=-1.0: it must be 0 or more seconds"),
        (["--threads", "0", "train.py"], "threads=0: it must be at least 1"),
    ],
)
def test_mistakes(words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    visible: str | None, listed: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
