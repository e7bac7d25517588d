"""The whole examination of this machine, its table and its JSON. With hosts:
tests/cluster/test_doctor.py."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allhands.cli.main import run
from allhands.doctor import Finding, Report, Request, allreduce, examination, examine
from allhands.doctor.contact import Contact
from allhands.doctor.finding import CHECKS
from allhands.doctor.render import as_json, show
from allhands.errors import HostError
from allhands.launch.hosts import read_hosts
from allhands.launch.local import LocalHost
from allhands.launch.ssh import SshHost

pytestmark = pytest.mark.serial


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json", "--dir", str(tmp_path)])
    told = json.loads(capfd.readouterr().out)
    assert code == (1 if told["problems"] else 0)
    assert set(told) == {"format", "ok", "problems", "warnings", "seconds", "hosts", "findings"}
    assert (told["format"], told["hosts"]) == (1, ["this machine"])
    found = {one["check"]: one for one in told["findings"]}
    assert all(
        set(one) == {"host", "check", "status", "found", "advice", "values"}
        for one in told["findings"]
    )
    assert set(found) <= set(CHECKS)
    assert found["folder"]["values"]["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    reduced = found["all-reduce"]["values"]
    assert (reduced["ranks"], reduced["hosts"], reduced["correct"]) == (2, 1, True)
    assert [one["bytes"] for one in reduced["sizes"]] == [4096, 1 << 20, 32 << 20]
    assert all(
        one["gb_per_s"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9, rel=0.1)
        for one in reduced["sizes"]
    )


class Failing(Contact):
    """Another host that is this machine, and goes away when it is asked something."""

    fails_at = ""

    def __init__(
        self, name: str, ssh: SshHost | None, python: str, env: Mapping[str, str | None]
    ) -> None:
        super().__init__(name, None, python, env)
        self.made = ssh

    def ask(self, op: str, timeout: float = 10.0, **question: Any) -> Any:
        if (self.name, op) == ("d2", self.fails_at):
            raise HostError("d2", "it went away")
        return super().ask(op, timeout, **question)

    def close(self) -> None:
        super().close()
        self.ssh = self.made


@pytest.mark.parametrize("op", ["facts", "clock", "resolve", "listen", "connect", "folder", "look"])
def test_a_host_that_goes_away_meanwhile(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "Contact", Failing)
    monkeypatch.setattr(Failing, "fails_at", op)
    mark = secrets.token_hex(6)  # other tests connect at the same time
    monkeypatch.setattr(
        "allhands.launch.ssh.secrets",
        SimpleNamespace(token_hex=lambda n: mark + secrets.token_hex(n - 6)),
    )
    request = Request(read_hosts("d1,d2,d3"), folder=str(tmp_path))
    report = examine(request)
    gone = [one for one in report.problems if one.host == "d2"]
    assert [(one.check, one.found) for one in gone] == [("ssh", "it went away")]
    for host in ("d1", "d3"):
        assert {"ssh", "python", "network", "folder"} <= {
            one.check for one in report.findings if one.host == host
        }
    (reduced,) = [one for one in report.findings if one.check == "all-reduce"]
    assert reduced.found == "not tried: d2 could not be examined"
    assert not list(Path("/tmp").glob(f"allhands-ssh-{mark}*"))
    assert list(tmp_path.iterdir()) == []


def test_an_all_reduce_that_fails_says_why() -> None:
    told, why = allreduce.measure([LocalHost({"GLOO_SOCKET_IFNAME": "eth77"})], [2])
    assert told is None
    assert "failed first" in why
    assert "eth77" in why


def test_inside_slurm_without_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["doctor", "--json", "--no-allreduce", "--dir", str(tmp_path)]
    assert run(words) == 1
    (slurm,) = [
        one for one in json.loads(capfd.readouterr().out)["findings"] if one["check"] == "slurm"
    ]
    assert slurm["status"] == "problem"
    assert slurm["found"] == "inside job 17 of Slurm on n[1-2], but there is no srun in PATH"
    (tmp_path / "srun").touch(0o755)
    run(words)
    (slurm,) = [
        one for one in json.loads(capfd.readouterr().out)["findings"] if one["check"] == "slurm"
    ]
    assert slurm["status"] == "ok"
    assert "allhands doctor -H NODES" in slurm["advice"]


def test_gpus_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    run(["doctor", "--json", "--gpus", "--dir", str(tmp_path)])
    (one,) = [
        one
        for one in json.loads(capfd.readouterr().out)["findings"]
        if one["check"] == "all-reduce"
    ]
    assert one["found"] == "not tried: --gpus, but this machine has no GPU that can be used"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sync-dst-dir", "/x"], "--sync-dst-dir is about other hosts; write -H HOSTS as well"),
        (["--python", "/x"], "--python is about other hosts"),
        (
            ["-H", "d1", "--dir", "/x", "--sync-dst-dir", "/y"],
            "write the one that `allhands launch` will use",
        ),
        (["--gpus", "--no-all-reduce"], "--gpus is about the all-reduce"),
        (["-H", "d1,d1"], "d1 is named twice"),
        (["-H", "d1", "--python", "/it's"], "shells read differently"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_use(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *words]) == 2
    captured = capfd.readouterr()
    assert said in captured.err
    assert captured.out == ""


REPORT = Report(
    ["this machine", "d1"],
    [
        Finding("d1", "rsync", "warning", "there is no rsync", "install it"),
        Finding("d1", "names", "ok", "its own name is 127.0.1.1", "a note"),
        Finding("", "ports", "problem", "d1 cannot connect to d2", "a firewall", {"port": 7}),
    ],
    3.14159,
)


def test_the_table_ends_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    show(REPORT)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines if not line.startswith(("┌", "└", "│"))] == [
        "d1",
        "together",
        "warning rsync on d1: there is no rsync",
        "  -> install it",
        "PROBLEM ports: d1 cannot connect to d2",
        "  -> a firewall",
        "1 problem, 1 warning (3.1 s)",
    ]
    assert any("a note" in line for line in lines)


def test_the_documentation_names_every_check_and_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert [name for name in rows if name in CHECKS] == list(CHECKS)
    assert set(json.loads(as_json(REPORT))) <= set(re.findall(r"`([a-z]+)`", page))
    assert set(json.loads(as_json(REPORT))["findings"][0]) <= set(re.findall(r"`([a-z]+)`", page))


def test_json() -> None:
    told = json.loads(as_json(REPORT))
    assert (told["ok"], told["problems"], told["warnings"], told["seconds"]) == (False, 1, 1, 3.14)
    assert told["findings"][2]["values"] == {"port": 7}
