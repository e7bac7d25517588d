"""An authority, a server's certificate, sites' key pairs and the list of sites, made for a
trial."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allhands.errors import UserError
from allhands.federated.sites.certificates import (
    AUTHORITY,
    check_authority,
    check_pair,
    date,
    read_certificates,
    read_private_key,
)
from allhands.federated.sites.site_keys import check_name, make_site_key, write_new

AUTHORITY_KEY = "authority.key"
SERVER, SERVER_KEY = "server.crt", "server.key"
SITES, ALLOWED = "sites", "sites.txt"
_AUTHORITY_DAYS = 3650
# Clocks of two machines differ: what is valid from this second on might be refused elsewhere.
_EARLIER = timedelta(hours=1)


def make(folder: Path, hosts: Sequence[str], sites: Sequence[str], days: int = 365) -> list[Path]:
    """Make an authority, a certificate for a server, a key pair for each site, and the list of
    sites, for a trial.

    What is there stays: an authority that the folder holds signs the new certificate, and new sites
    are added to the list.

    Args:
        folder: is made where it is missing.
        hosts: names and addresses by which sites reach the server; ``localhost`` and ``127.0.0.1``
            are added, by which the server's own processes do. None: no certificate, only sites.
        sites: their names.
        days: how long the server's certificate is valid.

    Returns:
        The files that were made or added to.

    Raises:
        UserError: neither host nor site; a name is none or given twice; a file exists already.
    """
    if not hosts and not sites:
        raise UserError(
            "neither --host nor --site was given; write --host NAME for the server's certificate, "
            "and --site NAME for each site"
        )
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise UserError(f"--days {days}: write a number from 1 to {_AUTHORITY_DAYS}")
    for option, names in (("--host", hosts), ("--site", sites)):
        twice = {name for name in names if list(names).count(name) > 1}
        if twice:
            raise UserError(f"{option} {min(twice)} was given twice; leave one out")
    alternatives = [
        _alternative(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])
    ]
    wanted = [
        folder / SITES / f"{check_name(name, '--site')}{end}"
        for name in sites
        for end in (".key", ".key.pub")
    ]
    wanted += [folder / SERVER, folder / SERVER_KEY] if hosts else []
    for path in wanted:
        if path.exists():
            raise UserError(
                f"{str(path)!r} exists already, and keys are never overwritten; move it away, or "
                "write another --out"
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = [] if not hosts else _make_server(folder, hosts[0], alternatives, days)
    if sites:
        (folder / SITES).mkdir(mode=0o700, exist_ok=True)
        for name in sites:
            path = folder / SITES / f"{name}.key"
            line = make_site_key(path, name)
            with open(folder / ALLOWED, "a") as file:
                file.write(line + "\n")
            made += [path, path.with_name(path.name + ".pub")]
        made.append(folder / ALLOWED)
    return made


def _make_server(
    folder: Path, host: str, alternatives: Sequence[x509.GeneralName], days: int
) -> list[Path]:
    made = []
    now = datetime.now(UTC).replace(microsecond=0)
    crt, key_path = folder / AUTHORITY, folder / AUTHORITY_KEY
    if crt.exists() or key_path.exists():
        check_authority(crt)
        authority = read_certificates(crt, "the authority")[0]
        signer = cast(
            ec.EllipticCurvePrivateKey, read_private_key(key_path, "the authority's private key")
        )
        check_pair(authority, signer, crt, key_path)
    else:
        signer = ec.generate_private_key(ec.SECP384R1())
        # A name of its own, so that two authorities are told apart in messages.
        name = _name(f"allhands trial authority {secrets.token_hex(4)}")
        authority = _sign(
            name,
            name,
            signer.public_key(),
            signer,
            now + timedelta(days=_AUTHORITY_DAYS),
            authority=True,
        )
        write_new(key_path, _private_bytes(signer), private=True)
        write_new(crt, authority.public_bytes(serialization.Encoding.PEM))
        made += [crt, key_path]
    until = now + timedelta(days=days)
    if until > authority.not_valid_after_utc:
        left = (authority.not_valid_after_utc - now).days
        raise UserError(
            f"--days {days}: the authority {str(crt)!r} ends on "
            f"{date(authority.not_valid_after_utc)}; write --days "
            f"{left}, or another --out for a new authority"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _sign(
        _name(host), authority.subject, key.public_key(), signer, until, alternatives=alternatives
    )
    write_new(folder / SERVER_KEY, _private_bytes(key), private=True)
    write_new(folder / SERVER, certificate.public_bytes(serialization.Encoding.PEM))
    return [*made, folder / SERVER, folder / SERVER_KEY]


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    until: datetime,
    *,
    authority: bool = False,
    alternatives: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    begin = datetime.now(UTC).replace(microsecond=0) - _EARLIER
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, until)
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    return builder.sign(signer, hashes.SHA384())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        if not host or "://" in host or ":" in host or " " in host or "/" in host:
            raise ValueError
        return x509.DNSName(host.encode("idna").decode())
    except ValueError:
        raise UserError(
            f"--host {host!r}: write a name or an address, without port and without https://"
        ) from None


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
