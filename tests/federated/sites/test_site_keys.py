"""Key pairs, the list of sites and tokens: what is taken, and in which words the rest is
refused."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from allhands.errors import UserError
from allhands.federated.sites import site_keys

OPENSSH = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
SECRET = "0123456789abcdef0123"
needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(site_keys, "_EDITED", 0.0)


def check(file: Path, site: str, token: str) -> str | None:
    """What the server says to a site that has this token."""
    return site_keys.check_token(
        file, site, site_keys.prove(token, "a challenge", site), "a challenge"
    )


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def private(key: object, form: str = "OpenSSH") -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        getattr(serialization.PrivateFormat, form),
        serialization.NoEncryption(),
    )


@pytest.fixture
def north(tmp_path) -> tuple[Path, str]:
    path = tmp_path / "north.key"
    return path, site_keys.make_site_key(path, "north")


def test_a_pair_is_what_flower_takes(north, tmp_path):
    path, line = north
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = serialization.load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(read, ec.EllipticCurvePrivateKey)
    assert isinstance(read.curve, ec.SECP384R1)
    asymmetric = pytest.importorskip("flwr.supercore.primitives.asymmetric")
    public = site_keys.read_site_key(path)
    assert public == asymmetric.public_key_to_bytes(read.public_key())
    allowed = site_keys.read_allow_list(
        write(tmp_path / "sites.txt", f"# ours\n\n{line} made today\n", 0o644)
    )
    assert allowed == {"north": public}
    assert site_keys.check_key(allowed, public) == ("north", "")
    registered = pytest.importorskip("flwr.cli.supernode.register").try_load_public_key(
        tmp_path / "north.key.pub"
    )
    assert registered == public


def test_keys_are_never_overwritten(north, tmp_path):
    path, _ = north
    before = path.read_bytes()
    with pytest.raises(
        UserError, match="north.key.pub' exists already, and keys are never overwritten"
    ):
        site_keys.make_site_key(path, "north")
    (tmp_path / "north.key.pub").unlink()
    with pytest.raises(UserError, match="north.key' exists already"):
        site_keys.make_site_key(path, "north")
    assert path.read_bytes() == before


def test_a_key_that_is_not_on_the_list_is_named_by_its_fingerprint(north, tmp_path):
    _, line = north
    other = tmp_path / "other.key"
    site_keys.make_site_key(other, "other")
    allowed = site_keys.read_allow_list(write(tmp_path / "sites.txt", line))
    name, reason = site_keys.check_key(allowed, site_keys.read_site_key(other))
    assert name is None
    assert site_keys.fingerprint(site_keys.read_site_key(other)) in reason
    assert "not on the list of sites" in reason
    for junk in (
        b"",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        os.urandom(50),
    ):
        assert site_keys.check_key(allowed, junk)[0] is None
        assert site_keys.fingerprint(junk) == "no key"


@needs_ssh_keygen
def test_a_fingerprint_is_that_of_ssh_keygen(north):
    path, _ = north
    said = subprocess.run(
        ["ssh-keygen", "-lf", f"{path}.pub"], capture_output=True, text=True
    ).stdout
    assert site_keys.fingerprint(site_keys.read_site_key(path)) in said


def test_private_keys_that_cannot_be_used_are_refused_with_what_to_do(north, tmp_path):
    path, _ = north
    good = path.read_bytes()
    curve = ec.generate_private_key(ec.SECP384R1())
    cases = {
        "there is no file": None,
        "is empty": b"  \n",
        "cut or damaged": good[: len(good) // 2],
        "cut or damaged; copy": good[:200] + b"x" + good[201:],
        "holds a public key; give the private one": Path(f"{path}.pub").read_bytes(),
        "no private key in OpenSSH's format": private(curve, "PKCS8"),
        "ssh-keygen -p": private(curve, "TraditionalOpenSSL"),
        "no key on a NIST curve": private(ed25519.Ed25519PrivateKey.generate()),
    }
    for words, data in cases.items():
        file = tmp_path / "case.key"
        file.unlink(missing_ok=True)
        if data is not None:
            write(file, data)
        with pytest.raises(UserError, match=words) as refused:
            site_keys.read_site_key(file)
        assert "--key" in str(refused.value)
        assert "case.key" in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        site_keys.read_site_key(tmp_path)
    write(path, good, 0o640)
    with pytest.raises(UserError, match=f"mode 0640.*chmod 600 {path}"):
        site_keys.read_site_key(path)


@needs_ssh_keygen
def test_a_passphrase_is_named_and_what_the_message_says_helps(tmp_path):
    for name, data in (
        ("mine", None),
        ("pem", private(ec.generate_private_key(ec.SECP384R1()), "PKCS8")),
    ):
        path = tmp_path / name
        if data is None:
            make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "a word", "-f", str(path)]
            subprocess.run(make, check=True)
        else:
            write(path, data)
        with pytest.raises(UserError, match=f"ssh-keygen -p -N '' -f {path}") as refused:
            site_keys.read_site_key(path)
        encrypted = name == "mine"
        assert ("is protected by a passphrase" in str(refused.value)) == encrypted
        old = ["-P", "a word"] if encrypted else []  # ssh-keygen would ask for it
        subprocess.run(
            ["ssh-keygen", "-p", *old, "-N", "", "-f", str(path)], check=True, capture_output=True
        )
        assert site_keys.fingerprint(site_keys.read_site_key(path)).startswith("SHA256:")


def test_lists_of_sites_that_are_wrong_are_refused_by_line(north, tmp_path):
    _, line = north
    ed = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*OPENSSH).decode()
    cases = {
        "is empty": "\n",
        "names no site": "# nobody yet\n",
        "line 2: write a site's name and its public key": f"{line}\nsouth\n",
        "line 1: the name 'a/b'": f"a/b{line.removeprefix('north')}",
        "line 1: the key of 'north' is cut": line[:-20],
        "of the kind ssh-ed25519": f"south {ed}",
        "line 3: there are two keys of 'north'": f"{line}\n# again\n{line}",
        "'south' has the key of 'north'": f"{line}\nsouth{line.removeprefix('north')}",
        "is no text": b"\xff\xfe\x00",
    }
    for words, text in cases.items():
        with pytest.raises(UserError, match=words):
            site_keys.read_allow_list(write(tmp_path / "sites.txt", text))
    with pytest.raises(UserError, match=r"the list of sites \(--sites\): there is no file"):
        site_keys.read_allow_list(tmp_path / "none.txt")


def test_a_token_that_is_taken_away_is_refused_at_once(tmp_path):
    file = write(tmp_path / "tokens", f"north {SECRET}\nsouth {SECRET}s\n")
    assert check(file, "north", SECRET) is None
    assert "is not the one" in check(file, "north", SECRET + "s")  # another site's
    assert "is not the one" in check(file, "north", SECRET[:-1])
    proof = site_keys.prove(SECRET, "a challenge", "north")
    assert SECRET not in proof
    assert "is not the one" in site_keys.check_token(file, "north", proof, "another challenge")
    assert "is not the one" in site_keys.check_token(file, "south", proof, "a challenge")
    # The token itself proves nothing.
    assert "is not the one" in site_keys.check_token(file, "north", SECRET, "a challenge")
    assert "is not the one" in site_keys.check_token(file, "north", "é", "a challenge")
    for nothing in (None, "", 7):
        assert "it has no token" in site_keys.check_token(file, "north", nothing, "a challenge")
    assert "no token of 'west'" in check(file, "west", SECRET)
    assert "no token of 'west'" in check(file, "west", "")
    write(file, f"south {SECRET}s\n")
    assert "no token of 'north'" in check(file, "north", SECRET)
    write(file, f"north {SECRET}\n", 0o644)
    assert "cannot be checked" in check(file, "north", SECRET)
    file.unlink()
    assert "there is no file" in check(file, "north", SECRET)


def test_a_file_of_tokens_that_is_just_being_written_refuses_nobody(tmp_path, monkeypatch):
    file = write(tmp_path / "tokens", "")
    monkeypatch.setattr(site_keys.time, "sleep", lambda _: write(file, f"north {SECRET}"))
    assert check(file, "north", SECRET) is None


def test_no_message_holds_a_token(tmp_path):
    bad = [
        f"north {SECRET} {SECRET}x",
        f"north {SECRET}\nsouth {SECRET}",
        f"north {SECRET}\nnorth {SECRET}y",
        "north short",
    ]
    for text in bad:
        file = write(tmp_path / "tokens", text)
        with pytest.raises(UserError) as refused:
            site_keys.read_tokens(file)
        assert SECRET not in str(refused.value)
        assert "short" not in str(refused.value).replace("at least", "")
        assert SECRET not in check(file, "north", SECRET)
    file = write(tmp_path / "tokens", f"north {SECRET}")
    for token in (SECRET + "z", SECRET[:-1]):
        reason = check(file, "north", token)
        assert SECRET not in reason
        assert token not in reason


def test_a_sites_own_token_comes_from_a_file_or_the_environment(tmp_path):
    file = write(tmp_path / "token", f"{SECRET}\n")
    assert site_keys.site_token(file, {}) == SECRET
    assert site_keys.site_token(None, {site_keys.TOKEN: f" {SECRET}\n"}) == SECRET
    assert site_keys.site_token(None, {}) is None
    for path, environ, words in [
        (file, {site_keys.TOKEN: SECRET}, "leave one of them out"),
        (None, {site_keys.TOKEN: "short"}, "at least 16"),
        (write(tmp_path / "two", f"north {SECRET}"), {}, "holds 2 words"),
        (write(tmp_path / "none", ""), {}, "is empty"),
        (write(tmp_path / "open", SECRET, 0o644), {}, "chmod 600"),
        (tmp_path / "missing", {}, "there is no file"),
    ]:
        with pytest.raises(UserError, match=words) as refused:
            site_keys.site_token(path, environ)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "-a", ".a", "a/b", "x" * 64, "é", "a\n"])
def test_names_that_are_none(name):
    with pytest.raises(UserError, match="write letters, digits"):
        site_keys.check_name(name)
    assert site_keys.check_name("St-Mary_2.north") == "St-Mary_2.north"


def test_importing_keys_and_certificates_imports_no_torch():
    code = (
        "import sys, allhands.federated.sites.site_keys, allhands.federated.sites.certificates; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
