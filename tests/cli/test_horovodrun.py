"""horovodrun's options, as those of `allhands launch`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allhands.cli import horovodrun, main
from allhands.errors import UserError
from tests.cli.test_launch import Launched, folder, launched

__all__ = ["folder", "launched"]  # fixtures

ARITY = {"--horovod": 0, "--grace": 1, "-n": 1, "--workers": 1, "-m": 0}


def words(*given: str) -> list[str]:
    return horovodrun.translated(["--horovod", *given], ARITY)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            ["-np", "4", "train.py", "-np", "9"],
            ["--workers", "4", "--horovod", "train.py", "-np", "9"],
        ),
        (["--num-proc=4", "train.py"], ["--workers", "4", "--horovod", "train.py"]),
        (["-np", "2", "-H", "localhost:4", "t.py"], ["--workers", "2", "--horovod", "t.py"]),
        (["-H", "localhost:4", "t.py"], ["--workers", "4", "--horovod", "t.py"]),
        (
            ["-np", "3", "-H", "a:2,u@b:1", "t.py"],
            ["--workers", "3", "--hosts", "a slots=2,u@b slots=1", "--horovod", "t.py"],
        ),
        (["-H", "a,b", "t.py"], ["--hosts", "a slots=1,b slots=1", "--horovod", "t.py"]),
        (["-H", "a:2", "-p", "2222", "t.py"], ["--hosts", "a:2222 slots=2", "--horovod", "t.py"]),
        (
            ["-np", "4", "--min-np", "2", "t.py"],
            ["--workers", "4", "--max-restarts", "100", "--min-workers", "2", "--horovod", "t.py"],
        ),
        (
            [
                "--min-np",
                "2",
                "--max-np",
                "8",
                "--reset-limit",
                "3",
                "--elastic-timeout",
                "60",
                "t.py",
            ],
            [
                "--workers",
                "8",
                "--max-restarts",
                "3",
                "--min-workers",
                "2",
                "--rejoin-timeout",
                "60",
                "--horovod",
                "t.py",
            ],
        ),
        (
            ["-np", "1", "--output-filename", "logs", "t.py"],
            ["--workers", "1", "--log-dir", "logs", "--horovod", "t.py"],
        ),
        (
            ["-np", "1", "--grace", "3", "-m", "t"],
            ["--workers", "1", "--horovod", "--grace", "3", "-m", "t"],
        ),
        (["-n4", "t.py"], ["--horovod", "-n4", "t.py"]),
        (["-np", "1", "--", "./prog", "-H"], ["--workers", "1", "--horovod", "--", "./prog", "-H"]),
    ],
)
def test_options(given: list[str], wanted: list[str]) -> None:
    assert words(*given) == wanted


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        (["--timeline-filename", "t.json"], f"HOROVOD_TIMELINE={os.path.abspath('t.json')}"),
        (["--start-timeout", "20"], "HOROVOD_START_TIMEOUT=20"),
        (["--fusion-threshold-mb", "32"], "HOROVOD_FUSION_THRESHOLD=33554432"),
        (["--cache-capacity", "7"], "HOROVOD_CACHE_CAPACITY=7"),
        (["--disable-cache"], "HOROVOD_CACHE_CAPACITY=0"),
        (["--stall-check-warning-time-seconds", "9"], "HOROVOD_STALL_CHECK_TIME_SECONDS=9"),
        (["--no-stall-check"], "HOROVOD_STALL_CHECK_TIME_SECONDS=0"),
        (["--stall-check-shutdown-time-seconds", "99"], "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=99"),
        (["--network-interface", "eth1"], "GLOO_SOCKET_IFNAME=eth1"),
    ],
)
def test_settings_are_variables(given: list[str], variable: str) -> None:
    made = words("-np", "1", *given, "t.py")
    assert made[made.index("--env") + 1] == variable


def test_what_has_no_effect_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--cycle-time-ms",
        "3",
        "--autotune",
        "--blacklist-cooldown-range",
        "1",
        "2",
        "-np",
        "1",
        "t.py",
    )
    assert words(*given) == ["--workers", "1", "--horovod", "t.py"]
    assert (
        "without effect here, and left out: --cycle-time-ms, --autotune, --blacklist-cooldown-range"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--jsrun", "t.py"], "--jsrun is not possible here; write `--launcher mpi`"),
        (["--host-discovery-script", "x.sh", "t.py"], "write the hosts with -H"),
        (["-i", "key", "t.py"], "~/.ssh/config"),
        (
            ["--wokers", "3", "t.py"],
            "--wokers is an option of neither horovodrun nor `allhands launch`",
        ),
        (["-np", "three", "t.py"], "'three' is no number"),
        (["-np"], "-np needs a value"),
        (
            ["-np", "4", "-H", "localhost:2", "t.py"],
            "-np 4, but the hosts have 2 slots; set -np to 2",
        ),
        (
            ["-np", "4", "--max-np", "2", "t.py"],
            "-np 4 is more than --max-np 2; set -np to 2 at most",
        ),
        (["-H", "a:1", "--hostfile", "f", "t.py"], "both -H and --hostfile are given"),
        (["-H", "a:x", "t.py"], "slots=x"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: list[str], text: str) -> None:
    with pytest.raises(UserError) as refused:
        words(*given)
    assert text in str(refused.value)


def test_a_hostfile_is_horovods(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=3 # the big one\n")
    assert words("-np", "5", "--hostfile", str(file), "t.py")[2:4] == [
        "--hosts",
        "a slots=2,b slots=3",
    ]


def test_it_is_a_launch_with_the_names(folder: Path, launched: list[Launched]) -> None:
    assert (
        main.run(["launch", "--horovod", "-np", "3", "-H", "localhost:3", "train.py", "-np", "5"])
        == 7
    )
    call = launched[0]
    assert (call.options.workers, call.command.args) == (3, ("-np", "5"))
    assert call.hosts[0]._env["ALLHANDS_HOROVOD"] == "1"


def test_the_scripts_own_option_of_that_name_is_the_scripts(
    folder: Path, launched: list[Launched]
) -> None:
    assert main.run(["launch", "-n", "2", "train.py", "--horovod"]) == 7
    assert launched[0].command.args == ("--horovod",)
    assert "ALLHANDS_HOROVOD" not in launched[0].hosts[0]._env
