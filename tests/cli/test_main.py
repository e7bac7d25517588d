"""The command line starts at once, and says what is wrong in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import allhands
from allhands.cli import main
from allhands.errors import UserError, WorkerError, WorldError


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from allhands.cli.main import main; main()", *words]


def test_help_is_quick_and_lists_all() -> None:
    took = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run(command("--help"), capture_output=True, text=True)
        after = os.times()
        # The processor's time, which does not depend on who else is at work.
        took.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        assert done.returncode == 0
    assert all(name in done.stdout for name in main.SUBCOMMANDS)
    assert min(took) < 0.3


def test_help_and_launch_do_not_import_torch() -> None:
    text = (
        "import sys\nfrom allhands.cli.main import run\nrun(['launch', '--help'])\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["lanch"], ["run", "--zzz"]])
def test_a_pipe_gets_no_colours(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(name, "1")
        main.run(words)
        written = capsys.readouterr()
        assert written.out + written.err
        assert "\x1b" not in written.out + written.err
        monkeypatch.delenv(name)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"allhands {allhands.__version__}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lanch", "x.py"], "there is no subcommand 'lanch'; did you mean 'launch'?"),
        (["zzz"], "there is no subcommand 'zzz'; there are: "),
        (["launch", "--workrs", "2", "x.py"], "No such option"),
        (["launch", "--workers", "two", "x.py"], "Invalid value for '--workers'"),
        (["launch", "-n", "2"], "no script was given; write `allhands launch -n 2 train.py`"),
    ],
)
def test_mistakes(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("allhands: error: ")
    assert text in err
    assert err.count("\n") == 1


def test_an_unknown_option_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["launch", "--workrs", "2", "x.py"])
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("mistake"), 2),
        (WorldError("contradiction"), 2),
        (WorkerError("rank 1 failed", 1, 77), 77),
    ],
)
def test_our_errors_come_without_a_traceback(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "broken_command.py").write_text("def broken() -> None:\n    raise ERROR\n")
    monkeypatch.syspath_prepend(tmp_path)
    import broken_command  # type: ignore[import-not-found]

    broken_command.ERROR = error
    monkeypatch.setitem(
        main.SUBCOMMANDS, "broken", main.Subcommand("broken_command", "broken", "Fail.")
    )
    assert main.run(["broken"]) == code
    assert capsys.readouterr().err == f"allhands: error: {error}\n"
    monkeypatch.delitem(sys.modules, "broken_command")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("allhands sw", ["sweep"]),
        ("allhands run optimizer.l", ["optimizer.lr="]),
        ("allhands predict --fo", ["--force"]),
    ],
)
def test_a_shell_completes_commands_options_and_keys(line: str, found: list[str]) -> None:
    environment = {
        **os.environ,
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_ALLHANDS_COMPLETE": "complete_bash",
    }
    done = subprocess.run(command(), capture_output=True, text=True, env=environment)
    assert done.stdout.split() == found, done.stderr


def test_completion_can_be_installed_and_costs_other_calls_nothing(tmp_path: Path) -> None:
    # Typer asks the processes above for the shell, and knows few of them.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    environment = {**os.environ, **named}
    words = command("--show-completion", "bash")
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert "_ALLHANDS_COMPLETE=complete_bash" in done.stdout, done.stderr
    assert not main._completes(["--help"])
    assert not main._completes(["run", "num_epochs=3"])
