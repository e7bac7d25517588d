"""`allhands federated certificates`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from allhands.cli.main import run
from allhands.federated.sites.certificates import check_server
from allhands.federated.sites.site_keys import read_allow_list, read_site_key


def test_what_it_makes_is_what_server_and_sites_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "keys"
    assert (
        run(
            [
                "federated",
                "certificates",
                "--out",
                str(out),
                "--host",
                "fl.example.org",
                "--site",
                "a",
                "--site",
                "b",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    check_server(out / "server.crt", out / "server.key", out / "authority.crt")
    assert read_allow_list(out / "sites.txt") == {
        name: read_site_key(out / "sites" / f"{name}.key") for name in ("a", "b")
    }
    files = {str(path) for path in out.rglob("*") if path.is_file()}
    assert set(said[::2]) == files  # each on a line, and below it what it is for
    for path, what in zip(said[::2], said[1::2], strict=True):
        assert ("secret" in what) == path.endswith(".key")
    assert not any("PRIVATE KEY" in line for line in said)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["federated", "certificates", "--out", str(tmp_path), "--site", "a"]) == 0
    before = read_site_key(tmp_path / "sites" / "a.key")
    assert run(["federated", "certificates", "--out", str(tmp_path), "--site", "a"]) == 2
    assert "a.key' exists already, and keys are never overwritten" in capsys.readouterr().err
    assert read_site_key(tmp_path / "sites" / "a.key") == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--out"),
        (["--out", "x"], "neither --host nor --site was given"),
        (["--out", "x", "--site", "../a"], "--site '../a': write letters"),
        (["--out", "x", "--host", "https://fl.example.org"], "write a name or an address"),
        (["--out", "x", "--host", "fl.example.org", "--days", "0"], "--days 0"),
    ],
)
def test_what_cannot_be_made_is_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["federated", "certificates", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
