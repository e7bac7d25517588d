"""The commands of a training across sites: what they refuse before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.cli import main
from allhands.errors import UserError

pytest.importorskip("flwr")
from allhands.federated.sites import sites_server, supervision, trial_keys

RUN = "data: digits\nstrategy: {name: federated, sites: {names: [north, south]}}\nlogdir: logs\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with keys for two sites."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yml").write_text(RUN)
    trial_keys.make(Path("keys"), ["127.0.0.1"], ["north", "south"])
    (tmp_path / "rows").mkdir()
    return tmp_path


SECURE = [
    "--certificate",
    "keys/server.crt",
    "--key",
    "keys/server.key",
    "--authority",
    "keys/authority.crt",
]
SITE = ["--server", "127.0.0.1:9", "--data", "rows", "--name", "north"]
SITE_KEYS = ["--key", "keys/sites/north.key", "--authority", "keys/authority.crt"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["server"],
            "--certificate, --key, --authority missing: `allhands federated certificates` makes "
            "them",
        ),
        (["server", *SECURE[:4], "--sites", "keys/sites.txt"], "--authority missing"),
        (["server", *SECURE], "--sites missing: the file with each site's name and public key"),
        (["server", "--insecure", *SECURE], "--insecure has no use for a certificate"),
        (
            ["server", "--insecure", "--sites", "keys/sites.txt"],
            "write the sites' names into the run file",
        ),
        (
            ["server", "--insecure", "strategy=ddp"],
            "sites train by rounds; write strategy: {name: federated, …}",
        ),
        (["server", "--insecure", "logdir=null"], "name a folder"),
        (["server", *SECURE, "--sites", "nowhere.txt"], "nowhere.txt"),
        (["server", *SECURE, "--sites", "keys/sites.txt", "--tokens", "none.txt"], "none.txt"),
        (["site", *SITE], "--key and --authority missing; for plain text"),
        (
            ["site", *SITE, "--insecure", *SITE_KEYS],
            "--insecure has no use for --key and --authority",
        ),
        (["site", *SITE, "--insecure", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["site", *SITE, "--insecure", "--name", "no/name"], "no/name"),
        (["site", *SITE, "--insecure", "--server", "127.0.0.1"], "write HOST:PORT"),
        (["site", "--insecure"], "Missing option"),
    ],
)
@pytest.mark.parametrize("plan", [[], ["--plan"]], ids=["run", "plan"])
def test_mistakes(
    words: list[str], plan: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["federated", words[0], "-C", "run.yml", *words[1:], *plan]) == 2
    assert text in capsys.readouterr().err
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    "verb", [["server", *SECURE, "--sites", "keys/sites.txt"], ["site", *SITE, *SITE_KEYS]]
)
def test_a_plan_finds_what_sites_cannot_train(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "federated",
        verb[0],
        "-C",
        "run.yml",
        *verb[1:],
        "strategy.algorithm=fedbuff",
        "--plan",
    ]
    assert main.run(given) == 2
    assert "algorithm='fedbuff' goes by virtual time" in capsys.readouterr().err
    assert main.run([word for word in given if "fedbuff" not in word]) == 0
    assert not Path("logs").exists()


def test_a_page_is_part_of_the_plan_and_off_unless_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["federated", "server", "-C", "run.yml", "--insecure", "--plan"]
    assert main.run(given) == 0
    assert "the run's page" not in capsys.readouterr().out
    for port, shown in (("8010", "127.0.0.1:8010"), ("0", "127.0.0.1:any")):
        assert main.run([*given, "--page", port]) == 0
        assert f"{shown}  the run's page, by a token in its address" in capsys.readouterr().out
    assert main.run([*given, "--page", "70000"]) == 2


def test_the_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["federated"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("simulate", "certificates", "server", "site", "app"))
    assert main.run(["federated", "site", "--nothing"]) == 2
    assert "see `allhands federated site --help`" in capsys.readouterr().err


def test_the_app_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["federated", "app", "-C", "run.yml", "--out", "app"]) == 0
    assert "names:" in Path("app/allhands_training/run.yml").read_text()
    assert main.run(["federated", "app", "-C", "run.yml", "--out", "app"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def options(**changes: object) -> sites_server.ServerOptions:
    """A server with the trial's certificate."""
    keys = Path("keys").absolute()
    given = {
        "config": [],
        "overrides": [],
        "host": "127.0.0.1",
        "port": 8000,
        "state": Path("state").absolute(),
        "certificate": keys / "server.crt",
        "key": keys / "server.key",
        "authority": keys / "authority.crt",
        "sites": keys / "sites.txt",
        "tokens": None,
        "data": None,
    }
    return sites_server.ServerOptions(**(given | changes))


@pytest.mark.parametrize(
    ("host", "own"),
    [("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1"), ("10.1.2.3", "localhost")],
)
def test_the_servers_own_processes_use_a_name_of_the_certificate(host: str, own: str) -> None:
    if host == "10.1.2.3":  # not of the certificate, and no loopback
        assert sites_server.own_host(options(host=host)) in ("127.0.0.1", "localhost")
        assert sites_server.own_host(options(host=host, certificate=None)) == host
        return
    assert sites_server.own_host(options(host=host)) == own


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"--port {port} cannot be listened on"),
            sites_server.SitesServer(options(port=port), "", {}),
        ):
            raise AssertionError("it listens on a port of another")


def test_what_the_server_writes_down_is_for_its_owner_only() -> None:
    with sites_server.SitesServer(options(), "", {}):
        assert Path("state").stat().st_mode & 0o777 == 0o700
        for name in (sites_server.SETTINGS, supervision.SECRET):
            assert (Path("state") / name).stat().st_mode & 0o777 == 0o600
