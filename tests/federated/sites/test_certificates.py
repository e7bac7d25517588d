"""The server's certificate: what is made for a trial, what is refused from the files, and what a
site sees of a server."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from allhands.errors import UserError
from allhands.federated.sites import site_keys, trial_keys
from allhands.federated.sites.certificates import (
    check_authority,
    check_server,
    names_of,
    probe,
    read_certificates,
)

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def trial(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    trial_keys.make(folder, ["fl.example.org", "10.1.2.3"], ["north", "south"])
    return folder


def sign(
    folder: Path,
    name: str,
    *,
    issuer: str = "authority",
    key: object = None,
    begin: object = NOW - DAY,
    end: object = NOW + DAY,
    hosts: tuple[str, ...] = ("localhost",),
    authority: bool = False,
) -> Path:
    """A certificate ``name.crt`` with its key ``name.key``, signed by another one of the folder."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    signer = (
        key
        if issuer == name
        else serialization.load_pem_private_key((folder / f"{issuer}.key").read_bytes(), None)
    )
    by = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    if issuer != name:
        by = x509.load_pem_x509_certificate((folder / f"{issuer}.crt").read_bytes()).subject
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(
        by, subject, key.public_key(), x509.random_serial_number(), begin, end
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=authority, path_length=None), critical=True
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False
        )
    made = builder.sign(signer, hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / f"{name}.key").write_bytes(key.private_bytes(*form))
    (folder / f"{name}.key").chmod(0o600)
    return folder / f"{name}.crt"


@pytest.fixture
def other(tmp_path) -> Path:
    """A folder with an authority of somebody else."""
    sign(tmp_path, "authority", issuer="authority", authority=True, hosts=())
    return tmp_path


def check(folder: Path, name: str = "server", authority: Path | None = None) -> None:
    check_server(
        folder / f"{name}.crt", folder / f"{name}.key", authority or folder / "authority.crt"
    )


# ---------------------------------------------------------------------- made for a trial


def test_what_is_made_fits_together_and_only_its_owner_reads_what_is_private(trial):
    check(trial)
    check_authority(trial / "authority.crt")
    (server,) = read_certificates(trial / "server.crt", "it")
    assert set(names_of(server)) == {"fl.example.org", "10.1.2.3", "localhost", "127.0.0.1"}
    for name in ("authority.key", "server.key", "sites/north.key", "sites/south.key"):
        assert stat.S_IMODE((trial / name).stat().st_mode) == 0o600
    allowed = site_keys.read_allow_list(trial / "sites.txt")
    assert allowed == {
        name: site_keys.read_site_key(trial / "sites" / f"{name}.key")
        for name in ("north", "south")
    }
    assert (
        datetime.timedelta(days=364)
        < server.not_valid_after_utc - NOW
        < datetime.timedelta(days=366)
    )


def test_a_folder_grows_and_nothing_in_it_is_overwritten(tmp_path):
    trial_keys.make(tmp_path, [], ["north"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sites", "sites.txt"]
    trial_keys.make(tmp_path, ["a.example"], ["south"], days=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for hosts, sites, words in [
        (["b.example"], [], "server.crt' exists already"),
        ([], ["west", "south"], "south.key' exists already"),
        (["b.example"], ["west"], "exists already, and keys are never overwritten"),
    ]:
        with pytest.raises(UserError, match=words):
            trial_keys.make(tmp_path, hosts, sites)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("server.crt", "server.key"):
        (tmp_path / name).unlink()
    trial_keys.make(tmp_path, ["b.example"], ["west"])  # signed by the authority that was there
    assert (tmp_path / "authority.crt").read_bytes() == before[tmp_path / "authority.crt"]
    check(tmp_path)
    assert list(site_keys.read_allow_list(tmp_path / "sites.txt")) == ["north", "south", "west"]


@pytest.mark.parametrize(
    ("hosts", "sites", "days", "words"),
    [
        ([], [], 365, "neither --host nor --site"),
        (["https://fl.example"], [], 365, "without https"),
        (["fl.example:8000"], [], 365, "without port"),
        ([""], [], 365, "--host ''"),
        (["fl.example"], ["a b"], 365, "--site 'a b'"),
        (["fl.example"], ["a", "a"], 365, "--site a was given twice"),
        (["fl.example"], [], 0, "--days 0"),
        (["fl.example"], [], 4000, "--days 4000"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(
    tmp_path, hosts, sites, days, words
):
    with pytest.raises(UserError, match=words):
        trial_keys.make(tmp_path / "new", hosts, sites, days)
    assert not (tmp_path / "new").exists()


def test_a_new_certificate_does_not_outlive_an_old_authority(other):
    with pytest.raises(UserError, match="--days 30: the authority .* ends on .*another --out"):
        trial_keys.make(other, ["fl.example"], [], 30)


# ---------------------------------------------------------------------- refused from the files


def test_certificates_that_are_not_valid_now_are_refused_with_the_date(other):
    for name, begin, end, words in [
        (
            "old",
            NOW - 9 * DAY,
            NOW - 2 * DAY,
            f"'old', expired on {NOW - 2 * DAY:%Y-%m-%d}.*make a new one",
        ),
        (
            "young",
            NOW + 2 * DAY,
            NOW + 9 * DAY,
            f"'young', is valid only from {NOW + 2 * DAY:%Y-%m-%d}.*the clock here says",
        ),
    ]:
        sign(other, name, begin=begin, end=end)
        with pytest.raises(UserError, match=words):
            check(other, name)
        sign(other, f"{name}-ca", issuer=f"{name}-ca", authority=True, begin=begin, end=end)
        with pytest.raises(
            UserError,
            match=f"the authority .*'{name}-ca', {'expired' if name == 'old' else 'is valid only'}",
        ):
            check_authority(other / f"{name}-ca.crt")


def test_a_certificate_of_another_authority_is_refused_with_both_names(trial, other):
    sign(other, "server")
    check(other)
    with pytest.raises(
        UserError, match=r"was signed by 'authority', and not by the authority in .*authority.crt"
    ):
        check(other, authority=trial / "authority.crt")
    with pytest.raises(UserError, match="'server' and no authority"):
        check(other, authority=other / "server.crt")


def test_what_lies_between_certificate_and_authority_is_followed(other):
    sign(other, "between", authority=True, hosts=())
    sign(other, "server", issuer="between", key=rsa.generate_private_key(65537, 2048))
    with pytest.raises(UserError, match="the certificates between both"):
        check(other)
    with (other / "server.crt").open("ab") as file:
        file.write((other / "between.crt").read_bytes())
    check(other)
    sign(other, "leaf", hosts=())
    sign(other, "forged", issuer="leaf")  # by a certificate that may not sign
    with (other / "forged.crt").open("ab") as file:
        file.write((other / "leaf.crt").read_bytes())
    with pytest.raises(UserError, match="and not by the authority in"):
        check(other, "forged")


def test_files_that_are_not_what_they_should_be_are_refused(trial, tmp_path):
    crt, key, authority = trial / "server.crt", trial / "server.key", trial / "authority.crt"
    good, good_key = crt.read_bytes(), key.read_bytes()

    def file(data: bytes, mode: int = 0o600) -> Path:
        path = tmp_path / "case"
        path.write_bytes(data)
        path.chmod(mode)
        return path

    for arguments, words in [
        ((tmp_path / "none", key, authority), r"\(--certificate\): there is no file"),
        ((crt, tmp_path / "none", authority), r"\(--key\): there is no file"),
        ((crt, key, tmp_path / "none"), r"\(--authority\): there is no file"),
        (
            (crt, trial / "authority.key", authority),
            "does not belong to the certificate .*server.crt",
        ),
        ((key, key, authority), "holds a private key; give the certificate"),
        ((crt, crt, authority), "holds no private key"),
    ]:
        with pytest.raises(UserError, match=words):
            check_server(*arguments)
    for data, words in [
        (b"", "is empty"),
        (b"hello", "no certificate in PEM form.*openssl x509"),
        (good[:200], "is cut"),
        (good.replace(good[100:140], b""), "cut or damaged"),
    ]:
        with pytest.raises(UserError, match=words):
            check_server(file(data), key, authority)
        with pytest.raises(UserError, match=words):
            check_authority(file(data))
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"word"),
    )
    hidden = serialization.load_pem_private_key(good_key, None).private_bytes(*form)
    for data, mode, words in [
        (b" \n", 0o600, "is empty"),
        (good_key[:80], 0o600, "cut or damaged"),
        (good, 0o600, "holds no private key"),
        (hidden, 0o600, "protected by a passphrase.*openssl pkey"),
        (good_key, 0o644, "mode 0644.*chmod 600"),
        (good_key, 0o620, "mode 0620"),
    ]:
        with pytest.raises(UserError, match=words):
            check_server(crt, file(data, mode), authority)


def test_a_certificate_without_a_host_is_refused(other):
    sign(other, "nobody", hosts=())
    with pytest.raises(UserError, match="names no host"):
        check(other, "nobody")


# ---------------------------------------------------------------------- seen from the site


@contextlib.contextmanager
def serving(
    crt: Path | None, key: Path | None = None, answer: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n"
) -> Iterator[int]:
    """A server on loopback that shows a certificate, or without one answers plain text; gives its
    port."""
    context = None
    if crt is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(crt, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                if context is not None:
                    with context.wrap_socket(connection, server_side=True) as tls:
                        tls.recv(1)
                else:
                    connection.recv(4096)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_site_trusts_its_server_and_no_other(trial, other):
    with serving(trial / "server.crt", trial / "server.key") as port:
        assert probe("127.0.0.1", port, trial / "authority.crt") is None
        assert probe("localhost", port, trial / "authority.crt") is None
        with pytest.raises(
            UserError, match="not trusted: it was signed by 'allhands trial authority .*--authority"
        ):
            probe("127.0.0.1", port, other / "authority.crt")
        with pytest.raises(UserError, match="not by the authorities of this machine"):
            probe("127.0.0.1", port, None)
        with pytest.raises(UserError, match="speaks TLS; leave --insecure out"):
            probe("127.0.0.1", port, None, insecure=True)
        with pytest.raises(UserError, match="there is no file"):
            probe("127.0.0.1", port, other / "none.crt")


def test_a_site_says_what_is_wrong_with_a_certificate(other):
    for name, options, words in [
        (
            "elsewhere",
            {"hosts": ("fl.example.org",)},
            "is for fl.example.org, and not for 'localhost'",
        ),
        (
            "old",
            {"begin": NOW - 9 * DAY, "end": NOW - DAY},
            "expired on .*let the server's operator make a new one",
        ),
        (
            "young",
            {"begin": NOW + DAY, "end": NOW + 9 * DAY},
            "is valid only from .*set the clock, or let",
        ),
    ]:
        sign(other, name, **options)
        with (
            serving(other / f"{name}.crt", other / f"{name}.key") as port,
            pytest.raises(UserError, match=f"localhost:{port} {words}"),
        ):
            probe("localhost", port, other / "authority.crt")


def test_a_server_of_plain_text_is_refused_unless_it_was_asked_for(trial):
    with serving(None) as port:
        assert probe("127.0.0.1", port, None, insecure=True) is None
        with pytest.raises(UserError, match="speaks plain text; start it with a certificate"):
            probe("127.0.0.1", port, trial / "authority.crt")


def test_a_server_that_is_not_there_may_still_come(trial):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert f"nobody answers at 127.0.0.1:{port}" in probe(
        "127.0.0.1", port, trial / "authority.crt"
    )
    assert "no host" in probe("nowhere.invalid", 8000, trial / "authority.crt")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = probe("127.0.0.1", silent.getsockname()[1], trial / "authority.crt", timeout=0.3)
    assert "does not answer within 0.3 s" in said
