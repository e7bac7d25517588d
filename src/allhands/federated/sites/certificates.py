"""The server's certificate: checked from its files, and looked at from the site before anything
starts.

Importing this module imports no torch.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID

from allhands.errors import UserError
from allhands.federated.sites.site_keys import read_file

AUTHORITY = "authority.crt"
_AGAIN = "make a new one by `allhands federated certificates --out DIR --host HOST`"
_LONGEST_CHAIN = 8
_OTHER_HOST = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def read_certificates(path: Path | str, what: str) -> list[x509.Certificate]:
    """All certificates of a file in PEM form."""
    data = read_file(path, what)
    if b"PRIVATE KEY-----" in data and b"-----BEGIN CERTIFICATE-----" not in data:
        raise UserError(
            f"{what}: {str(path)!r} holds a private key; give the certificate (.crt or .pem) here"
        )
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise UserError(
            f"{what}: {str(path)!r} holds no certificate in PEM form; bring it into it: openssl "
            f"x509 -inform der -in {path} -out NEW.crt"
        )
    if data.count(b"-----BEGIN CERTIFICATE-----") != data.count(b"-----END CERTIFICATE-----"):
        raise UserError(f"{what}: {str(path)!r} is cut; copy it again from where it was made")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise UserError(
            f"{what}: {str(path)!r} is cut or damaged; copy it again from where it was made"
        ) from None


def check_authority(path: Path | str) -> None:
    """Whether a file holds authorities by which a site can know its server."""
    what = "the authority (--authority)"
    roots = read_certificates(path, what)
    if not any(_is_authority(root) for root in roots):
        raise UserError(
            f"{what}: {str(path)!r} is the certificate of {_who(roots[0])} and no authority; give "
            f"the file of the one that signed it ({AUTHORITY})"
        )
    problems = [_when(root) for root in roots]
    if all(problems):
        raise UserError(f"{what}: {str(path)!r}, {_who(roots[0])}, {problems[0]}")


def check_server(certificate: Path | str, key: Path | str, authority: Path | str) -> None:
    """Whether a server can begin with these files.

    Args:
        certificate: the server's own certificate, and after it those between it and the authority,
            if there are some.
        key: its private key, which only its owner may read.
        authority: the file that sites get.
    """
    what = "the server's certificate (--certificate)"
    chain = read_certificates(certificate, what)
    private = read_private_key(key, "the server's private key (--key)")
    check_pair(chain[0], private, certificate, key)
    check_authority(authority)
    for link in chain:
        problem = _when(link)
        if problem:
            raise UserError(f"{what}: {str(certificate)!r}, {_who(link)}, {problem}; {_AGAIN}")
    if not names_of(chain[0]):
        raise UserError(
            f"{what}: {str(certificate)!r} names no host (subjectAltName), so that every site "
            f"would refuse it; {_AGAIN}"
        )
    if not _leads_to(chain, read_certificates(authority, "the authority (--authority)")):
        raise UserError(
            f"{what}: {str(certificate)!r} was signed by {_name_of(chain[-1].issuer)}, and not by "
            f"the authority in {str(authority)!r}; give the authority that signed it, and the "
            "certificates between both, if there are some, after the server's own in its file"
        )


def names_of(certificate: x509.Certificate) -> list[str]:
    """The hosts that a certificate is for: names and addresses."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    ]


def _leads_to(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> bool:
    link = chain[0]
    for _ in range(_LONGEST_CHAIN):
        if link in roots or any(_signed_by(link, root) for root in roots):
            return True
        after = next(
            (other for other in chain[1:] if other != link and _signed_by(link, other)), None
        )
        if after is None:
            return False
        link = after
    return False


def _signed_by(link: x509.Certificate, other: x509.Certificate) -> bool:
    try:
        link.verify_directly_issued_by(other)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return _is_authority(other)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return certificate.issuer == certificate.subject


def read_private_key(path: Path | str, what: str) -> PrivateKeyTypes:
    """A private key in PEM form, of any kind."""
    data = read_file(path, what)
    if b"PRIVATE KEY-----" not in data:
        raise UserError(
            f"{what}: {str(path)!r} holds no private key in PEM form; give the file that belongs "
            "to the certificate"
        )
    data = read_file(path, what, private=True)
    try:
        return serialization.load_pem_private_key(data, None)
    except TypeError:
        raise UserError(
            f"{what}: {str(path)!r} is protected by a passphrase, which nobody could enter; take "
            f"it away: openssl pkey -in {path} -out NEW.key"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(
            f"{what}: {str(path)!r} is cut or damaged; copy it again from where it was made"
        ) from None


def check_pair(
    certificate: x509.Certificate, key: PrivateKeyTypes, path: Path | str, key_path: Path | str
) -> None:
    """Raise `UserError` unless the key is that of the certificate."""
    if certificate.public_key() != key.public_key():
        raise UserError(
            f"the private key {str(key_path)!r} does not belong to the certificate {str(path)!r} "
            f"of {_who(certificate)}; give both from where they were made together"
        )


def _who(certificate: x509.Certificate) -> str:
    return _name_of(certificate.subject)


def _name_of(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return repr(str(common[0].value) if common else name.rfc4514_string())


def _when(certificate: x509.Certificate) -> str | None:
    """Why a certificate is not valid at this moment, as the end of a sentence."""
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {date(certificate.not_valid_after_utc)}"
    if now < certificate.not_valid_before_utc:
        return (
            f"is valid only from {date(certificate.not_valid_before_utc)} on, and the clock "
            f"here says {date(now)}"
        )
    return None


def date(moment: datetime) -> str:
    """A moment, for a message."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


# ---------------------------------------------------------------------- from the site


def probe(
    host: str,
    port: int,
    authority: Path | str | None,
    *,
    insecure: bool = False,
    timeout: float = 10.0,
) -> str | None:
    """Look at the server's certificate as a site will.

    Args:
        host, port: the server, as the site calls it.
        authority: a file with the authority that signs it; None: those that this machine trusts.
        insecure: the site wants plain text.
        timeout: seconds.

    Returns:
        None where a server answers that the site can trust (for `insecure`: that speaks plain
        text); what is wrong where none answers now, which may change.
    """
    where = f"{host}:{port}"
    if authority is not None:
        check_authority(authority)
    context = ssl.create_default_context(
        cafile=None if authority is None else str(Path(authority).expanduser())
    )
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise UserError(_distrust(host, port, authority, error, timeout)) from None
    except (ssl.SSLError, ConnectionResetError) as error:
        if insecure:
            return None
        if isinstance(error, ssl.SSLError) and error.reason in (
            "WRONG_VERSION_NUMBER",
            "HTTP_REQUEST",
            "RECORD_LAYER_FAILURE",
        ):
            raise UserError(
                f"the server {where} speaks plain text; start it with a certificate "
                "(--certificate, --key, "
                "--authority), or the site with --insecure where nothing is secret"
            ) from None
        return f"{where} ends the connection: {error}"
    except socket.gaierror:
        return f"there is no host {host!r} (its name is not known here)"
    except TimeoutError:
        return f"{where} does not answer within {timeout:g} s; is a firewall between?"
    except OSError as error:
        return f"nobody answers at {where}: {error.strerror or error}"
    if insecure:
        raise UserError(
            f"the server {where} speaks TLS; leave --insecure out, and give --authority FILE"
        )
    return None


def _distrust(
    host: str,
    port: int,
    authority: Path | str | None,
    error: ssl.SSLCertVerificationError,
    timeout: float,
) -> str:
    """Why the server's certificate is refused, in words that say what to do."""
    certificate = _presented(host, port, timeout)
    where = f"the certificate of the server {host}:{port}"
    if authority is None:
        by = "the authorities of this machine"
    else:
        by = f"the authority in {str(authority)!r}"
    if certificate is None:
        return f"{where} is not trusted: {error.verify_message}"
    when = _when(certificate)
    if when is not None:
        return (
            f"{where} {when}; {'set the clock, or ' if 'only from' in when else ''}let the "
            f"server's operator {_AGAIN}"
        )
    if error.verify_code in _OTHER_HOST:
        names = ", ".join(names_of(certificate)) or "no host"
        return (
            f"{where} is for {names}, and not for {host!r}; give --server one of these names, or "
            f"let the server's operator {_AGAIN.replace('HOST`', host + '`')}"
        )
    return (
        f"{where} is not trusted: it was signed by {_name_of(certificate.issuer)}, and not by {by} "
        f"({error.verify_message}); get the authority's file ({AUTHORITY}) from the server's "
        "operator and give it as --authority"
    )


def _presented(host: str, port: int, timeout: float) -> x509.Certificate | None:
    """The certificate that a server shows, believed or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as tls,
        ):
            shown = tls.getpeercert(binary_form=True)
        return None if shown is None else x509.load_der_x509_certificate(shown)
    except (OSError, ValueError):
        return None
