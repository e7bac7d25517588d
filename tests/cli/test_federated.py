"""`allhands federated server` and `site`: what they refuse from their files, before anything starts."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from allhands.cli.main import run
from allhands.federated.sites import trial_keys

RUN = """
data: {name: digits, batch_size: 32}
model: {name: simple_cnn, width: 4}
criterion: cross_entropy
optimizer: {name: sgd, lr: 0.1}
strategy: {name: federated, rounds: 2}
logdir: logs
"""
SERVER = {
    "certificate": "server.crt",
    "key": "server.key",
    "authority": "authority.crt",
    "sites": "sites.txt",
    "tokens": "tokens",
}
SITE = {"key": "sites/a.key", "authority": "authority.crt", "token-file": "token"}
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    trial_keys.make(folder / "keys", ["127.0.0.1"], ["a", "b"])
    trial_keys.make(folder / "other", ["127.0.0.1"], ["a"])
    for name, text in (("tokens", "a 0123456789abcdef\nb fedcba9876543210\n"), ("token", "0123456789abcdef\n")):
        (folder / "keys" / name).write_text(text)
        (folder / "keys" / name).chmod(0o600)
    (folder / "run.yml").write_text(RUN)
    (folder / "data").mkdir()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all files, to which a test may do what it wants; nothing can be started here."""

    def started(*command: object, **_: object) -> None:
        raise AssertionError(f"it starts {command}")

    shutil.copytree(made, tmp_path / "here")
    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("ALLHANDS_SITE_TOKEN", raising=False)
    return tmp_path / "here" / "keys"


def words(options: dict[str, str]) -> list[str]:
    return [
        word for name, path in options.items() for word in (f"--{name}", path if Path(path).is_absolute() else f"keys/{path}")
    ]


def server(options: dict[str, str], *more: str) -> int:
    return run(["federated", "server", "-C", "run.yml", *words(options), *more])


def site(options: dict[str, str], *more: str) -> int:
    # Nobody listens at port 9.
    needed = ["--server", "127.0.0.1:9", "--data", "data", "--name", "a"]
    return run(["federated", "site", "-C", "run.yml", *needed, *words(options), *more])


def cut(name: str) -> Change:
    return lambda keys: (keys / name).write_bytes((keys / name).read_bytes()[:90]) and None


def replaced(name: str, by: str) -> Change:
    return lambda keys: shutil.copy(keys / by, keys / name) and None


def empty(name: str) -> Change:
    return lambda keys: (keys / name).write_bytes(b"") and None


def open_to_all(name: str) -> Change:
    return lambda keys: (keys / name).chmod(0o644)


def other(name: str) -> Change:
    return lambda keys: shutil.copy(keys.parent / "other" / name, keys / name) and None


def gone(name: str) -> Change:
    return lambda keys: (keys / name).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gone("server.crt"), "the server's certificate (--certificate): there is no file"),
        (empty("server.crt"), "is empty"),
        (cut("server.crt"), "server.crt' is cut"),
        (cut("server.key"), "server.key' is cut or damaged"),
        (open_to_all("server.key"), "chmod 600"),
        (replaced("server.key", "server.crt"), "holds no private key"),
        (replaced("server.crt", "server.key"), "holds a private key; give the certificate"),
        (other("server.key"), "does not belong to the certificate"),
        (other("authority.crt"), "and not by the authority in"),
        (gone("sites.txt"), "the list of sites (--sites): there is no file"),
        (empty("sites.txt"), "sites.txt' is empty"),
        (cut("sites.txt"), "the key of 'a' is cut"),
        (open_to_all("tokens"), "the file of tokens (--tokens): others than its owner"),
        (empty("tokens"), "tokens' is empty"),
    ],
)
def test_a_server_refuses_files_that_it_cannot_use(
    folder: Path, change: Change, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    for plan in ((), ("--plan",)):
        assert server(SERVER, *plan) == 2
        assert said in capsys.readouterr().err
    assert not Path("logs").exists()


@pytest.mark.parametrize("missing", ["certificate", "key", "authority", "sites"])
def test_a_server_without_a_file_says_which_and_how_to_have_it(
    folder: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server({name: path for name, path in SERVER.items() if name != missing}) == 2
    assert f"--{missing} missing" in capsys.readouterr().err
    assert server({missing: SERVER[missing]}, "--insecure") == 2
    assert "--insecure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gone("sites/a.key"), "the site's private key (--key): there is no file"),
        (empty("sites/a.key"), "a.key' is empty"),
        (cut("sites/a.key"), "a.key' is cut or damaged"),
        (open_to_all("sites/a.key"), "chmod 600"),
        (replaced("sites/a.key", "sites/a.key.pub"), "holds a public key"),
        (replaced("sites/a.key", "server.key"), "no private key in OpenSSH's format"),
        (gone("authority.crt"), "the authority (--authority): there is no file"),
        (cut("authority.crt"), "authority.crt' is cut"),
        (replaced("authority.crt", "server.crt"), "and no authority"),
        (open_to_all("token"), "the site's token (--token-file): others than its owner"),
        (empty("token"), "token' is empty"),
        (lambda keys: os.environ.__setitem__("ALLHANDS_SITE_TOKEN", "0123456789abcdef"), "leave one of them out"),
    ],
)
def test_a_site_refuses_files_that_it_cannot_use(
    folder: Path, change: Change, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLHANDS_SITE_TOKEN", "")  # so that it is what it was when the test has ended
    monkeypatch.delenv("ALLHANDS_SITE_TOKEN")
    change(folder)
    assert site(SITE) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "0123456789abcdef" not in error


@pytest.mark.parametrize("missing", ["key", "authority"])
def test_a_site_without_a_file_says_which(folder: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert site({name: path for name, path in SITE.items() if name != missing}) == 2
    assert f"--{missing} missing" in capsys.readouterr().err
    assert site({missing: SITE[missing]}, "--insecure") == 2
    assert "--insecure has no use for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--server", "127.0.0.1"], "write HOST:PORT"),
        (["--server", "127.0.0.1:http"], "write HOST:PORT"),
        (["--name", "a b"], "write letters, digits"),
        (["--data", "nowhere"], "--data nowhere is not a folder"),
    ],
)
def test_a_site_refuses_what_is_no_address_name_or_folder(
    folder: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site(SITE, *given) == 2
    assert said in capsys.readouterr().err


def test_a_server_refuses_a_port_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert server(SERVER, "--port", port) == 2
    assert port in capsys.readouterr().err
